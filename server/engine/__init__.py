"""The engine: scheduler, paged KV pool, batch runner and sampling, in a process of its own.

Import from the modules themselves. `client` and `request` load without torch; `core` and `runner` do not.
"""
