"""One-line mutations of the sources, and whether the nearest tests detect them (`make mutate`).

The well-kept libraries were tried. mutmut derives modules' names from their paths and knows one root, ``src/``; here
there are two. cosmic-ray writes each mutation into the checkout, starts a pytest for it, and has one set of tests for
all modules: a night would be too short.
"""
