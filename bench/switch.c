/* A switch between network namespaces that delays frames, for kernels without netem.

     switch NAMESPACE...

   In each namespace it creates a TAP device eth0 with the hardware address 02:00:00:00:00:NN, with NN counting from 1.
   Frames are switched by these addresses. Each input line, "DELAY_US MBIT_S", sets the delay of frames and the rate of
   each port; 0 means no delay, or no limit. The switch ends at the end of its input. Frames carry the kernel's offloading
   header, so that 64 KiB pass as one frame, as in a virtual machine's network. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST_PORTS = 32, LARGEST = 1 << 17, AT_ONCE = 16, ETHERNET = 14 };

struct frame {
    struct frame *next;
    int64_t due_ns;
    int length;
    unsigned char bytes[];
};

/* Frames of one port leave in the order of their arrival. */
struct port {
    int device;
    int64_t sends_from_ns, receives_from_ns; /* busy with earlier frames until then */
    struct frame *first, **end;
};

static struct port ports[MOST_PORTS];
static int count;
static int64_t delay_ns;
static double mbit_s;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int open_device(const char *namespace) {
    char path[256];
    snprintf(path, sizeof path, "/var/run/netns/%s", namespace);
    int inside = open(path, O_RDONLY | O_CLOEXEC);
    if (inside < 0 || setns(inside, CLONE_NEWNET) < 0) die(path);
    close(inside);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (device < 0) die("/dev/net/tun");
    struct ifreq request = {.ifr_name = "eth0", .ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    int header = sizeof(struct virtio_net_hdr);
    if (ioctl(device, TUNSETIFF, &request) < 0) die("TUNSETIFF");
    if (ioctl(device, TUNSETVNETHDRSZ, &header) < 0) die("TUNSETVNETHDRSZ");
    if (ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) < 0) die("TUNSETOFFLOAD");
    return device;
}

static int64_t later(int64_t one, int64_t other) { return one > other ? one : other; }

/* Return the time at which a frame that arrives now is delivered. */
static int64_t due(struct port *source, struct port *target, int length, int64_t now) {
    if (mbit_s <= 0) return now + delay_ns;
    int64_t lasts = (int64_t)(length * 8000.0 / mbit_s);
    int64_t begins = later(now, source->sends_from_ns);
    source->sends_from_ns = begins + lasts;
    begins = later(begins, target->receives_from_ns);
    target->receives_from_ns = begins + lasts;
    return begins + lasts + delay_ns;
}

static void hold(struct port *source, struct port *target, const unsigned char *bytes, int length) {
    struct frame *frame = malloc(sizeof *frame + length);
    if (frame == NULL) die("malloc");
    frame->next = NULL;
    frame->due_ns = due(source, target, length, now_ns());
    frame->length = length;
    memcpy(frame->bytes, bytes, length);
    *target->end = frame;
    target->end = &frame->next;
}

/* Send a frame to the port with its address, or to all others. */
static void pass_on(int source, const unsigned char *bytes, int length) {
    static const unsigned char ours[5] = {2, 0, 0, 0, 0};
    const unsigned char *to = bytes + sizeof(struct virtio_net_hdr);
    int only = memcmp(to, ours, sizeof ours) == 0 ? to[5] - 1 : -1;
    for (int target = 0; target < count; target++)
        if (target != source && (only < 0 || target == only)) hold(&ports[source], &ports[target], bytes, length);
}

static void receive(int source) {
    static unsigned char bytes[LARGEST];
    for (int turn = 0; turn < AT_ONCE; turn++) {
        int length = read(ports[source].device, bytes, sizeof bytes);
        if (length < (int)sizeof(struct virtio_net_hdr) + ETHERNET) return;
        pass_on(source, bytes, length);
    }
}

static void deliver(void) {
    for (struct port *port = ports; port < ports + count; port++)
        while (port->first != NULL && port->first->due_ns <= now_ns()) {
            struct frame *frame = port->first;
            /* A full queue drops the frame, like a real switch. */
            if (write(port->device, frame->bytes, frame->length) < 0 && errno != EAGAIN && errno != EIO) die("write");
            port->first = frame->next;
            if (port->first == NULL) port->end = &port->first;
            free(frame);
        }
}

/* Return the time until the next delivery; negative if no frame is held. */
static int64_t idle_ns(void) {
    int64_t next = -1;
    for (struct port *port = ports; port < ports + count; port++)
        if (port->first != NULL && (next < 0 || port->first->due_ns < next)) next = port->first->due_ns;
    return next < 0 ? -1 : later(0, next - now_ns());
}

static int read_input(void) {
    static char line[256];
    double delay_us, rate;
    int length = read(STDIN_FILENO, line, sizeof line - 1);
    if (length <= 0) return 0;
    line[length] = 0;
    if (sscanf(line, "%lf %lf", &delay_us, &rate) == 2) {
        delay_ns = (int64_t)(delay_us * 1000);
        mbit_s = rate;
        puts("set");
        fflush(stdout);
    }
    return 1;
}

int main(int words, char **word) {
    struct pollfd waits[MOST_PORTS + 1] = {{.fd = STDIN_FILENO, .events = POLLIN}};
    if (words < 2 || words - 1 > MOST_PORTS) return 2;
    for (count = 0; count < words - 1; count++) {
        struct port *port = &ports[count];
        port->device = open_device(word[count + 1]);
        port->end = &port->first;
        waits[count + 1] = (struct pollfd){.fd = port->device, .events = POLLIN};
    }
    prctl(PR_SET_TIMERSLACK, 1);
    puts("ready");
    fflush(stdout);
    for (;;) {
        deliver();
        int64_t idle = idle_ns();
        struct timespec patience = {idle / 1000000000, idle % 1000000000};
        if (ppoll(waits, count + 1, idle < 0 ? NULL : &patience, NULL) <= 0) continue;
        if (waits[0].revents && !read_input()) return 0;
        for (int source = 0; source < count; source++)
            if (waits[source + 1].revents & POLLIN) receive(source);
    }
}
