"""Everyone follows the fit: the exchange of sums between machines (docs/decisions/002 and 004).

Members and the relay are state machines without I/O: bytes in, bytes out, time as an argument.
`statements` has the wire format, `transcript` the table of all transitions, `adding` the integers,
`member` and `relay` the two roles, `followed` and `everyone` the fit that a member follows,
`records` what is on disk, `virtual` a network in memory. One connection carries several runs:
`frames`, `relay_runs` and `member_runs` keep them apart.
"""
