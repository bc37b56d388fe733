"""ZeRO levels 0 to 3 on two engines; nothing outside knows which one runs."""
