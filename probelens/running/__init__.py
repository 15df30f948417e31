"""Many runs of one model: collecting activations, sweeping interventions."""
