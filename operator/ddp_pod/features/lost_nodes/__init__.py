"""A pod's part in finding lost nodes (docs/lost-nodes.md): it probes some peers, and follows pod 0 to another node."""
