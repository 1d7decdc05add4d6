"""Where the nodes and ranks of a job find each other, closed to everyone else.

store_protocol   torch's TCPStore protocol, served from Python
admission        which programs the store serves: this user's on this machine, and nodes that know the job's secret
store_server     the listening sockets, on a thread of the launcher
job_secret       the secret that the nodes of a job have in common
"""
