"""Model runner V1 of vLLM: what it asks of us, and how a step runs there."""
