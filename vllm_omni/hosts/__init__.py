"""Stages on other hosts: how such a host joins a front end, and what travels between them. No vLLM.

A front end listens at one port (``listener.py``); a host connects to it (``connection.py``), says which version and
checkpoint it has and which stages it serves, and starts an engine when the front end asks. vLLM's messages between a
client and its engine core travel over the same connection: on both hosts vLLM's own sockets are in private
directories, and never on a network.
"""
