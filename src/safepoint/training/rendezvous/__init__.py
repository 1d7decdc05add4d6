"""The store through which the nodes and ranks of a job find each other. It serves no other programs.

The store is torch's TCPStore: it holds values under keys in memory, and is not an object store.

store_protocol   torch's TCPStore protocol, served from Python
admission        which programs the store serves: this user's on this machine, and nodes with the job's secret
store_server     the listening sockets, on a thread of the launcher
job_secret       the secret that the nodes of a job have in common
"""
