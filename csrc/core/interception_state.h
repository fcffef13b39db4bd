// Whether products are intercepted and verified: switches of the process and of each thread.
#pragma once

#include "core/sites.h"

namespace holdfast {

// Verification is on while either of these is positive: the process-wide count, or this thread's.
void change_process_depth(int delta);
void change_thread_depth(int delta);
void change_thread_bypass(int delta);  // positive: this thread's products are not intercepted

bool verifying();
bool intercepting();  // whether this thread's products are to be looked at

// Counts a product that is not verified under its site, so that the report names it.
void note_uncovered(Op op);

// Turns interception off on this thread while alive (slow path, callbacks).
class Bypass {
 public:
  Bypass() { change_thread_bypass(1); }
  ~Bypass() { change_thread_bypass(-1); }
};

}  // namespace holdfast
