// Which matmul of the program a call is, and what was counted of it.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace holdfast {

enum class Op : uint8_t {
  mm,
  addmm,
  bmm,
  baddbmm,
  addmv,
  dot,
  addmm_activation,
  sdpa,
  sdpa_backward,
  int_mm,
  scaled_mm,
  int8pack_mm,
  int4pack_mm,
  quantized_linear,
  mkldnn_linear,
  sparse_mm,
  sparse_addmm,
  sparse_bmm,
  sparse_mv
};
const char* op_name(Op op);
Op op_named(std::string_view name);  // throws if there is none
bool covered(Op op);

enum class Role : uint8_t { forward, grad_a, grad_b, grad_qkv };

// By Role. The names in a site (sites.ROLES and sites.ATTENTION_ROLE in Python).
constexpr const char* kRoles[] = {"forward", "grad_a", "grad_b", "grad_qkv"};
static_assert(std::size(kRoles) == static_cast<int>(Role::grad_qkv) + 1);

// Which matmul of the program: module (0: outside any), op, how many-eth of its kind in the
// module, and whether it computes the output or a gradient.
struct SiteKey {
  uint32_t module = 0;
  Op op = Op::mm;
  uint16_t ordinal = 0;
  Role role = Role::forward;
  uint64_t packed() const {
    return uint64_t{module} << 32 | uint64_t{static_cast<uint8_t>(op)} << 24 |
        uint64_t{ordinal} << 8 | static_cast<uint8_t>(role);
  }
};

// Seconds that the parts of one checked product took.
struct Durations {
  double encode = 0, product = 0, verify = 0;
};

struct SiteCounters {
  SiteKey key;
  int64_t calls = 0, rows = 0, suspects = 0, unverified = 0;
  Durations seconds;
  double line = 0;  // threshold / rms of a row, of a call now and then
  std::string reason;  // why calls were not verified
};

// A protection's modules count as entered, in any thread, while its scope is open.
uint32_t open_scope();
void close_scope(uint32_t scope);

// The modules this thread is inside of, innermost last.
void push_module(uint32_t module, uint32_t scope);
void pop_module(uint32_t module);

// An autograd node; sequence numbers count per thread.
struct NodeId {
  uint64_t thread = 0, sequence = ~uint64_t{0};
  bool operator==(const NodeId& other) const {
    return thread == other.thread && sequence == other.sequence;
  }
};

// After current_site: the node of the product, or of the product whose gradient this is.
NodeId current_node();

// Names this thread's products while alive, wherever they are called: compiled code enters no
// module and has one autograd node for many products.
class Named {
 public:
  explicit Named(const SiteKey& key);
  explicit Named(Role role);  // outside any module; op is the kernel's
  ~Named();
  Named(const Named&) = delete;
  Named& operator=(const Named&) = delete;

 private:
  std::optional<SiteKey> outer_;
  bool outer_any_op_;
};

SiteKey current_site(Op op);  // of the op that this thread's kernel is called for

void count_unverified(const SiteKey& key, const char* reason);
// Whether the detection line of this call is to be noted: of a clean one now and then.
bool count_verified(const SiteKey& key, int64_t rows, int64_t suspects, const Durations& seconds);
void note_line(const SiteKey& key, double line);
std::vector<SiteCounters> counters();
void reset_counters();

}  // namespace holdfast
