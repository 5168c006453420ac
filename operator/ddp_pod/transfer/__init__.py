"""The client of web servers and object stores, which several features use."""
