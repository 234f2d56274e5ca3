// The functions of the fmt that libtorch's headers come with, compiled once. fmt declares some templates as
// instantiated elsewhere: here.
#include <fmt/format-inl.h>

template std::locale fmt::locale_ref::get<std::locale>() const;

FMT_BEGIN_NAMESPACE
namespace detail {

template thousands_sep_result<char> thousands_sep_impl<char>(locale_ref);
template char decimal_point_impl<char>(locale_ref);

}  // namespace detail
FMT_END_NAMESPACE
