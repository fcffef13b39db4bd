// Matrix products that pass through to torch, unverified: counted, so that the report names them.
#pragma once

namespace holdfast {

void list_products();  // registers with the dispatcher; called once

}  // namespace holdfast
