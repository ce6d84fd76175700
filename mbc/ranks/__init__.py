"""The processes of one training, one a GPU: how they start, meet, agree and fail together.

* `environment`: which rank this process is, as its launcher says
* `messages`: connections between ranks, and what travels over them
* `endpoints`: sockets and ports to listen at
* `mpi`: sums of NumPy arrays over ranks, by mpi4py
* `meeting`: where rank 0 listens, and how the others find it
* `agreement`: in what ranks must be alike
* `rank_group`: ranks that gather, agree, and end when one of them fails
* `member`: this process as a rank, for the modules that it opens
* `launch`: the ranks of one machine, started and watched
"""
