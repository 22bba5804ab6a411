// recv for MLX's ring, which reads its sockets in a loop: it waits for data in the kernel once before it returns
// without.

#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <cerrno>
#include <cstdint>
#include <ctime>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

timespec longest{};

}  // namespace

// The longest wait of one call, for all sockets.
EXPORTED void mlx_cpu_kernels_set_wait(int64_t nanoseconds) {
  longest = {static_cast<time_t>(nanoseconds / 1'000'000'000), static_cast<long>(nanoseconds % 1'000'000'000)};
}

EXPORTED ssize_t mlx_cpu_kernels_recv(int socket, void* buffer, size_t length, int flags) {
  const ssize_t count = recv(socket, buffer, length, flags);
  if (count != -1 || errno != EAGAIN) return count;  // data, the end of the stream, or an error
  pollfd wanted{socket, POLLIN, 0};
  ppoll(&wanted, 1, &longest, nullptr);  // whatever it returns, recv says the rest
  return recv(socket, buffer, length, flags);
}
