"""Server, workers, gateway and jobs started from one terminal."""
