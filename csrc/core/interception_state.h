// The switches of the process and of each thread that say whether products are intercepted and
// verified.
#pragma once

#include "core/sites.h"

namespace holdfast {

// Verification is on while the count of the process or that of this thread is positive.
void change_process_depth(int delta);
void change_thread_depth(int delta);
// While this count is positive, this thread's products are not intercepted.
void change_thread_bypass(int delta);

// While this count is positive, this thread runs compiled code, or compiles some. On a device the
// products of such code are verified by ops of its own, where products are not intercepted.
void change_thread_compiled(int delta);
bool in_compiled_code();

bool verifying();
bool intercepting();  // Either a verification or a fault injector wants this thread's products.

// Counts a product that is not verified, so that the report names its site.
void note_uncovered(Op op);

// Turns interception off on this thread while an instance exists, for products that holdfast itself
// computes.
class Bypass {
 public:
  Bypass() { change_thread_bypass(1); }
  ~Bypass() { change_thread_bypass(-1); }
};

}  // namespace holdfast
