"""``specplug serve``: an OpenAI-compatible server over engines in processes of their own."""
