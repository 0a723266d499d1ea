#pragma once
#include <cstddef>

// Stackful coroutines: one per CUDA thread. A switch saves callee-saved registers only (about 10 ns on x86-64).
namespace warpsmith::sim {

struct Stack {
  char* bottom = nullptr;
  size_t bytes = 0;
  void* sanitizer_fiber = nullptr;  // the thread sanitizer's name of whatever runs on this stack
};

struct Fiber {
  void* context = nullptr;
  Stack* stack = nullptr;
  void* fake_stack = nullptr;  // address sanitizer's
};

// Stacks are kept for the life of the process and handed out by number.
Stack& pooled_stack(size_t number);

// What ran on the first `count` pooled stacks happened before a later acquire of `order`.
void release_pooled_stacks(size_t count, void* order);

// After a failed launch: the frames on the first `count` pooled stacks are abandoned, so what sanitizers know of them
// is dropped. What ran on them happened before a later acquire of `order`.
void forget_pooled_stacks(size_t count, void* order);

// `entry` must not return. `colour` shifts the start of the stack, so that fibers do not share cache sets.
void prepare(Fiber& fiber, Stack& stack, void (*entry)(), unsigned colour);

// The fiber that runs on the OS thread's own stack.
void adopt_host_stack(Fiber& host);

void switch_fiber(Fiber& from, Fiber& to);

// First thing in an entry function.
void finish_first_switch();

}  // namespace warpsmith::sim
