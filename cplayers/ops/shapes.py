"""The legend of letters that name tensor extents throughout the library.

===  ==========================================================
T    tokens: rows of queries, packed request after request
S    keys (or sequences, where said)
N    query heads
K    KV heads
G    query heads per KV head, N / K
H    head dimension of queries and keys
V    head dimension of values
L    rank of the MLA latent
R    rotary dimensions of an MLA head
P    non-rotary dimensions of an MLA head
B    cache blocks
Z    block size, in tokens
===  ==========================================================

A name such as ``q_TNH`` carries its shape. An extent that is sharded over ranks keeps its letter.
"""
