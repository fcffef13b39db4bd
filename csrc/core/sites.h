// The site of a product, which says which matmul of the program it is, and the counters of each
// site.
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
  sparse_mv,
  grouped_mm,
  convolution,
  mkldnn_convolution,
  quantized_convolution
};
const char* op_name(Op op);
Op op_named(std::string_view name);  // It throws if no op has this name.
bool covered(Op op);

enum class Role : uint8_t { forward, grad_a, grad_b, grad_qkv };

// The names in the order of Role (sites.ROLES and sites.ATTENTION_ROLE in Python).
constexpr const char* kRoles[] = {"forward", "grad_a", "grad_b", "grad_qkv"};
static_assert(std::size(kRoles) == static_cast<int>(Role::grad_qkv) + 1);

// Identifies a matmul of the program: the number of its module (0 if it is outside any), its op,
// its number among the calls of that op in the module, and whether it computes the output or a
// gradient.
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

// Returns the key of a site that is given by its parts, as in Python; throws if there is no such
// op.
SiteKey site_key(int64_t module, std::string_view op, int64_t ordinal, int64_t role);

// The seconds that each part of a checked product took.
struct Durations {
  double encode = 0, product = 0, verify = 0;
};

struct SiteCounters {
  SiteKey key;
  int64_t calls = 0, rows = 0, suspects = 0, unverified = 0;
  Durations seconds;
  double line = 0;  // The threshold of a row divided by its rms, measured at some calls.
  std::string reason;  // The reason why calls were not verified.
};

// Opens the scope of one protection. Its modules count as entered, in any thread, until the scope
// is closed.
uint32_t open_scope();
void close_scope(uint32_t scope);

// Enters and leaves a module on this thread.
void push_module(uint32_t module, uint32_t scope);
void pop_module(uint32_t module);

// An autograd node. Each thread numbers its own nodes.
struct NodeId {
  uint64_t thread = 0, sequence = ~uint64_t{0};
  bool operator==(const NodeId& other) const {
    return thread == other.thread && sequence == other.sequence;
  }
};

// Returns the autograd node of the product for which current_site was called last on this thread.
// For a gradient that is the node of the product whose gradient it is.
NodeId current_node();

// Sets the site of all products of this thread while an instance exists. Compiled code needs this:
// it enters no module and has one autograd node for many products.
class Named {
 public:
  explicit Named(const SiteKey& key);
  explicit Named(Role role);  // Outside any module, with the op of each kernel that is called.
  ~Named();
  Named(const Named&) = delete;
  Named& operator=(const Named&) = delete;

 private:
  std::optional<SiteKey> outer_;
  bool outer_any_op_;
};

// Returns the site of the product for which a kernel of `op` is called now on this thread.
SiteKey current_site(Op op);

void count_unverified(const SiteKey& key, const char* reason);
// Returns whether to call note_line for this call, which is so for some of the clean calls.
bool count_verified(const SiteKey& key, int64_t rows, int64_t suspects, const Durations& seconds);
// Counts a row as suspect of which a device tells after its product was counted.
void note_suspect(const SiteKey& key);
void note_line(const SiteKey& key, double line);
std::vector<SiteCounters> counters();
void reset_counters();

}  // namespace holdfast
