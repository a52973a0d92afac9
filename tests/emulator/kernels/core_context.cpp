// core_context.cpp: two contexts that hand a number to and fro, to test the switch by itself.
//
// Prints "ok" if every switch kept integer and floating-point values alive, and both stacks are where they should be.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "context.h"

namespace {

emu::Context main_context, first, second;
char *first_stack, *second_stack;
long passed = 0;

void check(bool holds, const char* what) {
  if (holds) return;
  printf("wrong: %s\n", what);
  exit(1);
}

// Keeps more values alive over the switch than a caller-saved register file holds.
void hand_over(emu::Context& own, emu::Context& other, const char* stack, int factor) {
  double doubles[12];
  long integers[12];
  for (int i = 0; i < 12; ++i) {
    doubles[i] = 0.5 * factor * i;
    integers[i] = 1000 * factor + i;
  }
  double sum = factor;
  long total = factor;
  for (int round = 1; round <= 1000; ++round) {
    char here;
    check(&here > stack && &here < stack + emu::stack_bytes(), "the stack");
    check(reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) % 16 == 0, "the alignment of the frame");
    ++passed;
    emu::switch_context(own, other);
    for (int i = 0; i < 12; ++i) {
      sum += doubles[i];
      total += integers[i];
    }
    check(sum == factor + round * 0.5 * factor * 66, "floating-point values");
    check(total == factor + round * (12000L * factor + 66), "integers");
  }
}

void enter_first() {
  hand_over(first, second, first_stack, 3);
  emu::switch_context(first, main_context);
}

void enter_second() {
  hand_over(second, first, second_stack, 7);
  emu::switch_context(second, first);
}

}  // namespace

int main() {
  first_stack = emu::new_stack();
  second_stack = emu::new_stack();
  for (int times = 0; times < 2; ++times) {  // a context may be prepared again, its old state is dropped
    passed = 0;
    emu::prepare(first, first_stack, 0, enter_first);
    emu::prepare(second, second_stack, 192, enter_second);
    emu::switch_context(main_context, first);
    check(passed == 2000, "the number of switches");
  }
  puts("ok");
}
