"""The commands of `ddp` that talk to a cluster, one module each, and what they share.

They log in and connect through the official `kubernetes` client, which is imported when a command connects and not
before: `ddp --help` and completion stay quick. Nothing here is needed to use the operator; kubectl does all of it.
"""
