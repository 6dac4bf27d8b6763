"""The contracts, and the plain tools that everything else stands on; numpy and scipy only."""
