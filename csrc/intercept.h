// Interception of torch's own GEMM kernels on CPU: encoding, fault sites, verification.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "sites.h"
#include "verify.h"

namespace holdfast {

enum class Stage : int { checksum, operand, output };

// Everything the slow path in Python needs to decide on suspect rows.
struct Suspicion {
  SiteKey key;
  const Problem& problem;
  const at::Tensor& output;
  const Encoding& encoding;
  const at::Tensor& rows;  // what verify() says of them
  bool kept;               // the encoding was made before this op
  std::function<at::Tensor()> rerun;
};

using SuspectHandler = std::function<void(const Suspicion&)>;
using DamageHandler = std::function<void(const SiteKey&)>;  // a kept encoding was found damaged
using SiteHook =
    std::function<void(Stage, const SiteKey&, const Problem&, const Encoding&, const at::Tensor&)>;

void set_handlers(SuspectHandler suspect, DamageHandler damage);
void arm(SiteHook hook);  // an empty hook disarms

// Verification is on while any of these is positive: process-wide count, or this thread's.
void change_process_depth(int delta);
void change_thread_depth(int delta);

// Turns interception off on this thread while alive (slow path, hooks).
class Bypass {
 public:
  Bypass();
  ~Bypass();
};

void install();  // registers the kernels with the dispatcher, once

}  // namespace holdfast
