"""How a strategy communicates: its options, and the communicator that heeds them."""
