"""The agent, the rendezvous and the fork server."""
