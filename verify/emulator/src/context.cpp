// context.cpp: the context switch, by hand for x86-64 and AArch64, by ucontext for anything else.
//
// Source: System V ABI for AMD64 (rbx, rbp, r12-r15 belong to the caller); AAPCS64 (x19-x30, d8-d15).
// ucontext makes a system call per switch and is some 30 times slower; -DEMU_CONTEXT_UCONTEXT selects it anywhere.
#include "context.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#ifndef EMU_CONTEXT_UCONTEXT
extern "C" void emu_switch_stack(void** from, void* to);  // pushes, *from = sp, sp = to, pops, continues there
#endif

#if defined(EMU_CONTEXT_UCONTEXT)
#elif defined(__x86_64__)
asm(R"(
.text
.globl emu_switch_stack
.hidden emu_switch_stack
.type emu_switch_stack,@function
emu_switch_stack:
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
  popq %rcx
  jmp *%rcx
.size emu_switch_stack,.-emu_switch_stack
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl emu_switch_stack
.hidden emu_switch_stack
.type emu_switch_stack,%function
emu_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emu_switch_stack,.-emu_switch_stack
)");
#endif

namespace emu {
namespace {

// A context that was dropped in the middle of a call has left its frames marked in AddressSanitizer's shadow.
void forget_frames([[maybe_unused]] char* stack, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(stack, bytes);
#endif
}

}  // namespace

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kGuardBytes = 64 * 1024;  // a multiple of every page size in use

size_t stack_bytes() { return kStackBytes; }

char* new_stack() {
  void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  mprotect(memory, kGuardBytes, PROT_NONE);
  return static_cast<char*>(memory) + kGuardBytes;
}

#if defined(EMU_CONTEXT_UCONTEXT)

void prepare(Context& context, char* stack, size_t offset, void (*entry)()) {
  forget_frames(stack, kStackBytes);
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = kStackBytes - offset;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

#else

void prepare(Context& context, char* stack, size_t offset, void (*entry)()) {
  forget_frames(stack, kStackBytes);
  void** top = reinterpret_cast<void**>(stack + kStackBytes - 64 - offset);  // a multiple of 64
#if defined(__x86_64__)
  *--top = nullptr;  // entry's return address: at a function's first instruction rsp is 8 modulo 16
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
#else
  top -= 20;
  memset(top, 0, 20 * sizeof(void*));
  top[11] = reinterpret_cast<void*>(entry);  // x30, where ret goes
#endif
  context.stack_pointer = top;
}

void switch_context(Context& from, Context& to) { emu_switch_stack(&from.stack_pointer, to.stack_pointer); }

#endif

}  // namespace emu
