"""The loops on data: pretraining, its curriculum, its measurements, and stopping and going on."""
