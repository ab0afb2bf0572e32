"""Helpers for testing a training script: `from sftron.testing import assert_trainer_is_sound`."""

from sftcheck.testing import assert_trainer_is_sound as assert_trainer_is_sound
