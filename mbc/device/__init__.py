"""What is known of a GPU, its data sheet and its profile, and measuring one. Planning reads these without CUDA."""
