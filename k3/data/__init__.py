"""What the network learns from: corpora, token stores, packing, mixture, and a loader that resumes
exactly."""
