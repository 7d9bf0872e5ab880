/* A switch with shaped ports for an emulated cluster.
 *
 * usage: switch CONTROL_FD RATE_BIT_S DELAY_US MESSAGE_US MTU NAMESPACE_FD...
 *
 * The switch creates a TAP interface eth0 with address 10.77.0.(i+1)/24 in network namespace i, and forwards frames between
 * the interfaces. Each port has a virtual clock instead of a token bucket, so that no frame is sent faster than the rate:
 *   up port i    sends one frame after another at the port's rate. Each destination has a queue, and the queues are served
 *                in turn, as by a card with fair queues, so that a busy receiver does not delay frames for other receivers. At
 *                most AHEAD bytes are read from the TAP before they are sent. The sender's own queue stores the rest, so
 *                that no frame is lost.
 *   down port j  works in the same way, cut-through, and is shared by all senders to a node. A frame starts when the port is
 *                free, or will be free within SLACK_NS, so that frames do not accumulate in the switch. Credits of a lossless
 *                network have the same effect.
 * A frame then has a fixed delay, and a port may lose frames at random, drop all frames, or be down.
 * Between two ports a frame may pass further wires, each with its own rate and virtual clock. The command "route" names these
 * wires, so that a network of any shape can be emulated. Frames for a busy wire wait in the sender's queue, as for a busy port.
 * MESSAGE_US is added for every frame that ends a message (TCP push flag, more than 100 bytes), as the cost of a network card.
 * Frames of up to 64 KiB are forwarded as one unit (segmentation offload); the headers of their segments count.
 *
 * Control (SOCK_SEQPACKET): "delay US", "message US", "rate PORT BIT_S", "wire WIRE BIT_S",
 * "route PORT PORT WIRE...", "loss PORT P", "hole PORT 0|1", "link PORT 0|1",
 * "stats". Each command gets one answer. The switch ends when the other end of the control socket is closed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PORTS = 64, WIRES = 1024, HOPS = 16, FRAME = 70000, VNET = 10, ETH = 14, READ_AHEAD_NS = 30000, SLACK_NS = 1000000, AHEAD = 1 << 26, BATCH = 64 };

typedef struct Packet {
    struct Packet *next;
    int64_t due;
    int size, wire, last; /* bytes, bytes on the wire, ends a message */
    uint8_t data[];
} Packet;

typedef struct { Packet *head, *tail; } Queue;

typedef struct {
    int tap, inet;               /* TAP device; a socket inside the namespace, for ioctls */
    double rate, loss;
    int hole;
    int64_t up_free, down_free;  /* times at which the port has sent and delivered all earlier frames */
    Queue to[PORTS], out;        /* frames that wait, by destination; frames on the way to the node */
    int waiting, turn;           /* bytes in `to`; the destination that is served next */
    uint64_t frames_in, bytes_in, frames_out, bytes_out, drops, messages;
} Port;

typedef struct { double rate; int64_t free; } Wire;
typedef struct { int count, wire[HOPS]; } Route;

static Port port[PORTS];
static Wire wire[WIRES];
static Route route[PORTS][PORTS];
static int ports;
static int64_t delay_ns, message_ns, late_max_ns;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what) {
    printf("error %s: %s\n", what, strerror(errno));
    fflush(stdout);
    exit(1);
}

static void set_address(int inet, struct ifreq *r, unsigned long what, uint32_t address) {
    struct sockaddr_in *in = (struct sockaddr_in *)&r->ifr_addr;
    memset(in, 0, sizeof *in);
    in->sin_family = AF_INET;
    in->sin_addr.s_addr = htonl(address);
    if (ioctl(inet, what, r)) die("address");
}

static int set_up(int inet, const char *name, int up) {
    struct ifreq r = {0};
    strcpy(r.ifr_name, name);
    if (ioctl(inet, SIOCGIFFLAGS, &r)) return -1;
    r.ifr_flags = up ? r.ifr_flags | IFF_UP | IFF_RUNNING : r.ifr_flags & ~IFF_UP;
    return ioctl(inet, SIOCSIFFLAGS, &r);
}

static void open_port(int i, int ns, double rate, int mtu) {
    struct ifreq r = {0};
    if (setns(ns, CLONE_NEWNET)) die("setns");
    if ((port[i].tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC)) < 0) die("/dev/net/tun");
    strcpy(r.ifr_name, "eth0");
    r.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    if (ioctl(port[i].tap, TUNSETIFF, &r)) die("tap interface");
    if (ioctl(port[i].tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) die("tap offload");
    if ((port[i].inet = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) < 0) die("socket");
    r.ifr_hwaddr.sa_family = 1; /* ARPHRD_ETHER; the last byte is the port, so forwarding needs no table */
    memset(r.ifr_hwaddr.sa_data, 0, 6);
    r.ifr_hwaddr.sa_data[0] = 2;
    r.ifr_hwaddr.sa_data[5] = (char)(i + 1);
    if (ioctl(port[i].inet, SIOCSIFHWADDR, &r)) die("hardware address");
    r.ifr_mtu = mtu;
    if (ioctl(port[i].inet, SIOCSIFMTU, &r)) die("mtu");
    set_address(port[i].inet, &r, SIOCSIFADDR, 0x0a4d0001u + (uint32_t)i);
    set_address(port[i].inet, &r, SIOCSIFNETMASK, 0xffffff00u);
    if (set_up(port[i].inet, "lo", 1) || set_up(port[i].inet, "eth0", 1)) die("interface up");
    port[i].rate = rate;
}

/* bytes on the wire: every segment has its own headers, plus 24 bytes of preamble, checksum and gap */
static int on_wire(int size, int segment, int header) {
    int payload = size - header;
    if (segment <= 0 || payload <= segment) return size + 24;
    return payload + (payload + segment - 1) / segment * (header + 24);
}

static int ends_message(const uint8_t *e, int size) {
    if (size < 54 || e[12] != 8 || e[13] || e[23] != 6) return 0;
    const int ip = (e[ETH] & 15) * 4;
    const uint8_t *tcp = e + ETH + ip;
    return (tcp[13] & 8) && size - ETH - ip - (tcp[12] >> 4) * 4 > 100;
}

static int lost(const Port *p) { return p->hole || (p->loss > 0 && drand48() < p->loss); }

static void push(Queue *q, Packet *p) {
    p->next = 0;
    if (q->tail) q->tail->next = p; else q->head = p;
    q->tail = p;
}

/* sorted by due time, because a frame over fast wires overtakes a frame over slow wires */
static void insert(Queue *q, Packet *p) {
    if (!q->tail || q->tail->due <= p->due) { push(q, p); return; }
    Packet **at = &q->head;
    while ((*at)->due <= p->due) at = &(*at)->next;
    p->next = *at;
    *at = p;
}

static Packet *pop(Queue *q) {
    Packet *p = q->head;
    if (!(q->head = p->next)) q->tail = 0;
    return p;
}

/* put a frame from port i's node into the queue of its destination */
static void accept_frame(int i, const uint8_t *frame, int size) {
    Port *from = &port[i];
    uint16_t header, segment;
    memcpy(&header, frame + 2, 2);
    memcpy(&segment, frame + 4, 2);
    const uint8_t *e = frame + VNET;
    int wire = on_wire(size - VNET, frame[1] ? segment : 0, header ? header : 66), last = ends_message(e, size - VNET);
    from->frames_in++;
    from->bytes_in += wire;
    from->messages += last;
    if (lost(from)) { from->drops++; return; }
    for (int j = 0; j < ports; j++) {
        if (j == i || (e[0] != 0xff && (e[0] != 2 || e[5] - 1 != j))) continue;
        Packet *p = malloc(sizeof *p + size);
        if (!p) { from->drops++; return; }
        p->size = size;
        p->wire = wire;
        p->last = last;
        memcpy(p->data, frame, size);
        push(&from->to[j], p);
        from->waiting += size;
    }
}

/* return the time when a frame from i to j can start, because its receiver and all wires on its way are free */
static int64_t free_at(int i, int j) {
    const Route *r = &route[i][j];
    int64_t latest = port[j].down_free;
    for (int k = 0; k < r->count; k++) if (wire[r->wire[k]].free > latest) latest = wire[r->wire[k]].free;
    return latest;
}

/* let a frame pass the wires from i to j; return the time when the last wire has sent the frame */
static int64_t pass(int i, int j, int size, int64_t start) {
    const Route *r = &route[i][j];
    int64_t done = start;
    for (int k = 0; k < r->count; k++) {
        Wire *w = &wire[r->wire[k]];
        w->free = (start > w->free ? start : w->free) + (int64_t)(size * 8e9 / w->rate);
        if (w->free > done) done = w->free;
    }
    return done;
}

/* let port i send the head of its queue for j */
static void send_frame(int i, int j, int64_t t) {
    Port *from = &port[i], *to = &port[j];
    Packet *p = pop(&from->to[j]);
    from->waiting -= p->size;
    int64_t extra = p->last ? message_ns : 0, start = t > from->up_free ? t : from->up_free;
    from->up_free = start + (int64_t)(p->wire * 8e9 / from->rate) + extra;
    int64_t passed = pass(i, j, p->wire, start);
    if (lost(to)) { to->drops++; free(p); return; }
    int64_t done = (start > to->down_free ? start : to->down_free) + (int64_t)(p->wire * 8e9 / to->rate) + extra;
    to->down_free = done > from->up_free ? done : from->up_free;
    p->due = (passed > to->down_free ? passed : to->down_free) + delay_ns;
    insert(&to->out, p);
}

/* let every port send what it can; return the time when a port can continue, at most `next` */
static int64_t forward(int64_t t, int64_t next) {
    static int first;
    first = (first + 1) % ports; /* so that no port is always first at a busy receiver */
    for (int k = 0; k < ports; k++) {
        int i = (first + k) % ports;
        Port *from = &port[i];
        while (from->waiting && from->up_free <= t + READ_AHEAD_NS) {
            int64_t soonest = INT64_MAX;
            int found = -1;
            for (int n = 0; n < ports && found < 0; n++) {
                int j = (from->turn + n) % ports;
                if (!from->to[j].head) continue;
                int64_t when = free_at(i, j);
                if (when <= t + SLACK_NS) found = j;
                else if (when < soonest) soonest = when;
            }
            if (found < 0) {
                if (soonest - SLACK_NS < next) next = soonest - SLACK_NS;
                break;
            }
            from->turn = (found + 1) % ports;
            send_frame(i, found, t);
        }
        if (from->waiting && from->up_free > t + READ_AHEAD_NS && from->up_free - READ_AHEAD_NS < next) next = from->up_free - READ_AHEAD_NS;
    }
    return next;
}

/* deliver the frames that are due; return the time when the next frame is due */
static int64_t deliver(int64_t t, int64_t next) {
    for (int j = 0; j < ports; j++) {
        Port *p = &port[j];
        while (p->out.head && p->out.head->due <= t) {
            Packet *k = pop(&p->out);
            if (t - k->due > late_max_ns) late_max_ns = t - k->due;
            if (write(p->tap, k->data, k->size) < 0) p->drops++;
            else { p->frames_out++; p->bytes_out += k->size; }
            free(k);
        }
        if (p->out.head && p->out.head->due < next) next = p->out.head->due;
    }
    return next;
}

static void receive(int i) {
    static uint8_t frame[FRAME];
    for (int n = 0; n < BATCH && port[i].waiting < AHEAD; n++) {
        int size = (int)read(port[i].tap, frame, sizeof frame);
        if (size <= VNET + ETH) return;
        accept_frame(i, frame, size);
    }
}

static int stats(char *out, size_t room) {
    int n = snprintf(out, room, "late_max_us=%.0f", (double)late_max_ns / 1e3);
    for (int i = 0; i < ports; i++)
        n += snprintf(out + n, room - n, "\n%lu %lu %lu %lu %lu %lu", port[i].frames_in, port[i].bytes_in, port[i].frames_out,
                      port[i].bytes_out, port[i].drops, port[i].messages);
    late_max_ns = 0;
    return n;
}

/* read "PORT PORT WIRE..."; return whether the ports and wires exist */
static int set_route(const char *text) {
    int i, j, used;
    Route r = {0};
    if (sscanf(text, "%d %d%n", &i, &j, &used) != 2 || i < 0 || j < 0 || i >= ports || j >= ports) return 0;
    for (text += used; r.count < HOPS && sscanf(text, "%d%n", &r.wire[r.count], &used) == 1; text += used, r.count++)
        if (r.wire[r.count] < 0 || r.wire[r.count] >= WIRES || wire[r.wire[r.count]].rate <= 0) return 0;
    if (*text) return 0;
    route[i][j] = r;
    return 1;
}

/* return 0 if the other end of the control socket is closed */
static int control(int fd) {
    static char in[256], out[16384];
    int i, n = (int)recv(fd, in, sizeof in - 1, 0);
    double x;
    if (n <= 0) return 0;
    in[n] = 0;
    n = sprintf(out, "ok");
    if (sscanf(in, "delay %lf", &x) == 1) delay_ns = (int64_t)(x * 1000);
    else if (sscanf(in, "message %lf", &x) == 1) message_ns = (int64_t)(x * 1000);
    else if (sscanf(in, "rate %d %lf", &i, &x) == 2 && i >= 0 && i < ports && x > 0) port[i].rate = x;
    else if (sscanf(in, "wire %d %lf", &i, &x) == 2 && i >= 0 && i < WIRES && x > 0) wire[i].rate = x;
    else if (!strncmp(in, "route ", 6) && set_route(in + 6)) ;
    else if (sscanf(in, "loss %d %lf", &i, &x) == 2 && i >= 0 && i < ports) port[i].loss = x;
    else if (sscanf(in, "hole %d %lf", &i, &x) == 2 && i >= 0 && i < ports) port[i].hole = x != 0;
    else if (sscanf(in, "link %d %lf", &i, &x) == 2 && i >= 0 && i < ports) { if (set_up(port[i].inet, "eth0", x != 0)) n = sprintf(out, "error %s", strerror(errno)); }
    else if (!strncmp(in, "stats", 5)) n = stats(out, sizeof out);
    else n = sprintf(out, "error unknown command or port: %s", in);
    return send(fd, out, n, MSG_NOSIGNAL) >= 0;
}

static void carry(int control_fd) {
    for (;;) {
        int64_t t = now_ns(), next = deliver(t, forward(t, t + 1000000000LL)); /* in this order, because frames that are sent now may be due now */
        struct pollfd fds[PORTS + 1];
        int which[PORTS + 1], n = 0;
        for (int i = 0; i < ports; i++) {
            if (port[i].waiting < AHEAD) { fds[n] = (struct pollfd){port[i].tap, POLLIN, 0}; which[n++] = i; }
        }
        fds[n] = (struct pollfd){control_fd, POLLIN, 0};
        int64_t wait = next - now_ns();
        if (wait < 0) wait = 0;
        struct timespec ts = {wait / 1000000000LL, wait % 1000000000LL};
        if (ppoll(fds, n + 1, &ts, 0) <= 0) continue;
        for (int k = 0; k < n; k++) if (fds[k].revents & POLLIN) receive(which[k]);
        if (fds[n].revents && !control(control_fd)) return;
    }
}

int main(int argc, char **argv) {
    if (argc < 7 || argc - 6 > PORTS) { printf("error usage: 1 to %d namespaces\n", PORTS); return 2; }
    int control_fd = atoi(argv[1]);
    double rate = atof(argv[2]);
    delay_ns = (int64_t)(atof(argv[3]) * 1000);
    message_ns = (int64_t)(atof(argv[4]) * 1000);
    for (; ports < argc - 6; ports++) open_port(ports, atoi(argv[6 + ports]), rate, atoi(argv[5]));
    struct sched_param high = {.sched_priority = 20};
    int realtime = !sched_setscheduler(0, SCHED_FIFO, &high);
    mlockall(MCL_CURRENT | MCL_FUTURE);
    printf("ready realtime=%d\n", realtime);
    fflush(stdout);
    carry(control_fd);
    return 0;
}
