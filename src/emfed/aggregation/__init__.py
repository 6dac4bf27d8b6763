"""How parts become a sum: lattices, masks, tags, noise, bytes."""
