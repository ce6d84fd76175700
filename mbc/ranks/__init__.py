"""The processes of one training, one for each GPU: how they start, meet, agree and fail together.

* `environment`: the rank of this process, from its launcher's variables
* `messages`: connections between ranks, and their messages
* `endpoints`: sockets and ports at which rank 0 listens
* `mpi`: sums of NumPy arrays over ranks, through mpi4py
* `meeting`: rank 0 listens, and the other ranks find it
* `agreement`: facts in which ranks must agree or differ
* `rank_group`: ranks that gather, agree, and end when one of them fails
* `member`: this process as a rank, for the modules that it opens
* `launch`: starts the ranks of one machine and waits for them
"""
