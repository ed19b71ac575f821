"""Who drafts for each request and how deep: what a step costs, what it is likely to give, and the
choice that gives the most tokens a second. Plain numpy; nothing here reads a device."""
