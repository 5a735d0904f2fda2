"""Pure, differentiable building blocks; no state, any device, any float dtype."""
