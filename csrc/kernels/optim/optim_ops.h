#pragma once

// The ops over lists of tensors, a row each: ROW(op). Their names in errors are made from it.
#define WARPSMITH_OPTIM_OPS(ROW) ROW(adamw)

// The optimizers, a row each: ROW(optimizer, functor of optimizers.h). Kernels, CPU loops, planners and what
// warpsmith.optim knows of states and hyperparameters are made from it.
#define WARPSMITH_OPTIMIZERS(ROW) \
  ROW(adamw, AdamW)               \
  ROW(adam, Adam)                 \
  ROW(sgd, SGD)                   \
  ROW(lion, Lion)                 \
  ROW(adagrad, Adagrad)           \
  ROW(rmsprop, RMSprop)

// Optimizers whose step also takes norms of whole tensors, a row each: ROW(optimizer, functor of layerwise.h).
#define WARPSMITH_LAYERWISE_OPTIMIZERS(ROW) ROW(lamb, LAMB)
