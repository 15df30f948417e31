"""The inside of transformers' recurrent mixers: reference forwards in the place of their own."""

from probelens.adapters.hf.mixers.kinds import faster_mixers, has_inside, instrumented, mixer_points

__all__ = ["faster_mixers", "has_inside", "instrumented", "mixer_points"]
