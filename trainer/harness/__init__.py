"""Published tasks on a trained model: those of lm-eval and of MTEB, each an optional package."""
