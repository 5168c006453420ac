"""`ddp mcp`: jobs for assistants, over the Model Context Protocol."""
