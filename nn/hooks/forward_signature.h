#pragma once
// Signature of a module's forward, own or inherited, as a type: `R(A...)` or `R(A...) const` with exact argument types.

#include <cstddef>
#include <tuple>

namespace tessera::detail {

template <class F>
struct MemberSignature;
template <class R, class C, class... A>
struct MemberSignature<R (C::*)(A...)> {
  using type = R(A...);
};
template <class R, class C, class... A>
struct MemberSignature<R (C::*)(A...) noexcept> {
  using type = R(A...);
};
template <class R, class C, class... A>
struct MemberSignature<R (C::*)(A...) const> {
  using type = R(A...) const;
};
template <class R, class C, class... A>
struct MemberSignature<R (C::*)(A...) const noexcept> {
  using type = R(A...) const;
};

template <class Impl>
concept HasOneForward = requires {
  &Impl::forward;
};

template <class Impl>
struct ForwardSignature {
  static_assert(HasOneForward<Impl>,
                "tessera::Hooked<Impl>: Impl needs one public function `forward`. If it is overloaded or a template, "
                "name the signature that the hooks are for: TESSERA_MODULE_SIGNATURE(Name, at::Tensor(at::Tensor)) "
                "or tessera::Hooked<Impl, at::Tensor(at::Tensor)>. A container without forward needs no hooks: "
                "TORCH_MODULE(Name)");
  using type = void;
};
template <HasOneForward Impl>
struct ForwardSignature<Impl> {
  using type = typename MemberSignature<decltype(&Impl::forward)>::type;
};

template <class Impl>
using forward_signature_t = typename ForwardSignature<Impl>::type;

}  // namespace tessera::detail
