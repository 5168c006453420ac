"""This pod: its environment, its files and its clock."""
