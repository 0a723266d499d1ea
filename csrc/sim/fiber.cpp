#include "sim/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>

#include "sim/sanitizers.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace warpsmith::sim {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(WARPSMITH_SIM_TSAN)
constexpr size_t kStackBytes = 512 << 10;
#else
constexpr size_t kStackBytes = 256 << 10;
#endif
constexpr size_t kGuardBytes = 4096;
constexpr unsigned kColours = 61, kColourBytes = 320;
// A fiber that has ended leaves the frames of its last switch, not far below where its colour made it start. Their
// red zones are still forbidden; what it called before was allowed again as it returned.
[[maybe_unused]] constexpr size_t kLeftBytes = kColours * kColourBytes + (4 << 10);

std::deque<Stack> stacks;
Fiber* host_fiber = nullptr;
[[maybe_unused]] Stack host_stack;

Stack new_stack() {
  void* memory = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("sim: no memory for a thread's stack");
    std::abort();
  }
  mprotect(memory, kGuardBytes, PROT_NONE);
  Stack s;
  s.bottom = static_cast<char*>(memory) + kGuardBytes;
  s.bytes = kStackBytes;
  allow_memory(s.bottom, s.bytes);
#ifdef WARPSMITH_SIM_TSAN
  s.sanitizer_fiber = __tsan_create_fiber(0);
#endif
  return s;
}

}  // namespace

#if defined(__x86_64__)
extern "C" void warpsmith_sim_switch(void** save, void* load);
asm(R"(
.text
.globl warpsmith_sim_switch
.type warpsmith_sim_switch,@function
warpsmith_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size warpsmith_sim_switch,.-warpsmith_sim_switch
)");
#endif

Stack& pooled_stack(size_t number) {
  while (stacks.size() <= number) stacks.push_back(new_stack());
  return stacks[number];
}

void release_pooled_stacks([[maybe_unused]] size_t count, [[maybe_unused]] void* order) {
#ifdef WARPSMITH_SIM_TSAN
  void* host = __tsan_get_current_fiber();
  for (size_t i = 0; i < count && i < stacks.size(); ++i) {
    __tsan_switch_to_fiber(stacks[i].sanitizer_fiber, __tsan_switch_to_fiber_no_sync);
    order_release(order);
  }
  __tsan_switch_to_fiber(host, __tsan_switch_to_fiber_no_sync);
#endif
}

void forget_pooled_stacks(size_t count, void* order) {
  release_pooled_stacks(count, order);
  for (size_t i = 0; i < count && i < stacks.size(); ++i) {
    [[maybe_unused]] Stack& s = stacks[i];
    allow_memory(s.bottom, s.bytes);
#ifdef WARPSMITH_SIM_TSAN
    __tsan_destroy_fiber(s.sanitizer_fiber);
    s.sanitizer_fiber = __tsan_create_fiber(0);
#endif
  }
}

void prepare(Fiber& fiber, Stack& stack, void (*entry)(), unsigned colour) {
  allow_memory(stack.bottom + stack.bytes - kLeftBytes, kLeftBytes);
  fiber.stack = &stack;
  fiber.fake_stack = nullptr;
#if defined(__x86_64__)
  const uintptr_t top =
      (reinterpret_cast<uintptr_t>(stack.bottom) + stack.bytes - colour % kColours * kColourBytes) & ~uintptr_t{63};
  void** sp = reinterpret_cast<void**>(top);
  *--sp = nullptr;  // the alignment a function expects at its first instruction
  *--sp = reinterpret_cast<void*>(entry);
  for (int saved_register = 0; saved_register < 6; ++saved_register) *--sp = nullptr;
  fiber.context = sp;
#else
  auto* context = static_cast<ucontext_t*>(fiber.context ? fiber.context : std::malloc(sizeof(ucontext_t)));
  getcontext(context);
  context->uc_stack.ss_sp = stack.bottom;
  context->uc_stack.ss_size = stack.bytes - colour % kColours * kColourBytes;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  fiber.context = context;
#endif
}

void adopt_host_stack(Fiber& host) {
  host_fiber = &host;
  host.stack = &host_stack;
#ifdef WARPSMITH_SIM_TSAN
  host_stack.sanitizer_fiber = __tsan_get_current_fiber();
#endif
#if !defined(__x86_64__)
  if (!host.context) host.context = std::malloc(sizeof(ucontext_t));
#endif
}

void switch_fiber(Fiber& from, Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack->bottom, to.stack->bytes);
#endif
#ifdef WARPSMITH_SIM_TSAN
  __tsan_switch_to_fiber(to.stack->sanitizer_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__)
  warpsmith_sim_switch(&from.context, to.context);
#else
  swapcontext(static_cast<ucontext_t*>(from.context), static_cast<ucontext_t*>(to.context));
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void finish_first_switch() {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (!host_stack.bottom) {  // the first fiber ever comes from the host's stack, whose bounds are learnt here
    host_stack.bottom = static_cast<char*>(const_cast<void*>(bottom));
    host_stack.bytes = bytes;
  }
#endif
}

}  // namespace warpsmith::sim
