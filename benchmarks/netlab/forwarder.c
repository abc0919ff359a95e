/* The cable between the laboratory's hosts: moves IPv4 packets between TUN devices with a given rate and latency.
 *
 *   forwarder LATENCY_NS BYTES_PER_SECOND QUEUE_BYTES MTU FD:ADDRESS [FD:ADDRESS ...]
 *
 * Each FD is an open TUN device (one NIC), ADDRESS the IPv4 address behind it. A packet passes three stages:
 *
 *   NIC of the sender           the cable      NIC of the receiver
 *   [egress at the rate] ------ latency ------ [ingress at the rate] ---> written to its TUN
 *
 * The ingress clock is advanced when the first bit arrives, not when the packet is read, so a packet that waits in
 * one sender's egress queue never holds up the packet of another sender (the switch is cut-through: a lone packet
 * pays for its own length once). Both queues are first-in first-out per NIC, hence no sorting anywhere.
 *
 * Control: "cut N" / "join N" lines on stdin unplug and plug NIC N; SIGUSR1 prints the counters as one JSON line on
 * stdout; end of file on stdin (the laboratory is gone), SIGTERM or SIGINT print them a last time and end.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#define MAX_NICS 1024
#define READ_BATCH 32          /* packets taken from one NIC before the others get their turn */
#define COALESCE_NS 100000     /* at most one round per 100 us, as NICs gather interrupts: a third less CPU */
#define EARLY_NS 50000         /* deliver up to this early: half a round, and about what a wake-up costs */
#define SMALL_BYTES 512        /* acknowledgements and the like leave their full-size buffer at once */
#define NEVER INT64_MAX
#define LATE_BUCKETS 24        /* lateness histogram: bucket b counts [2^(b-1), 2^b) us, bucket 0 less than 1 us */

struct packet {
    struct packet *next;
    int64_t when;              /* on the grad_dtype: arrival of the first bit; in the inbox: departure of the last bit */
    int32_t length;
    uint16_t destination;
    bool large;
    unsigned char bytes[];
};

struct queue {
    struct packet *head, *tail;
    int64_t bytes;
};

struct nic {
    int fd;
    bool cut;
    int64_t egress_free, ingress_free; /* when the serialiser becomes idle */
    struct queue wire;                 /* sent by this NIC, not yet arrived */
    struct queue inbox;                /* arrived at this NIC, not yet fully received */
    int64_t sent_packets, sent_bytes, received_packets, received_bytes, dropped_packets, peak_queue_bytes;
};

static struct nic nics[MAX_NICS];
static int num_nics;
static uint16_t nic_of_low_bits[65536]; /* by the last two address bytes; index + 1, 0 is unknown */
static uint32_t network_bits;           /* the first two address bytes, shared by all NICs */
static int64_t latency_ns, queue_limit_bytes, foreign_packets, late_max_ns, late_counts[LATE_BUCKETS];
static double ns_per_byte;
static int mtu;
static struct packet *spare; /* free list of full-size buffers */

static int64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static struct timespec as_timespec(int64_t ns) { return (struct timespec){ns / 1000000000, ns % 1000000000}; }

static void sleep_until(int64_t when) {
    struct timespec t = as_timespec(when);
    if (when > clock_ns())
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t wire_time(const struct packet *p) { return (int64_t)(p->length * ns_per_byte); }

static struct packet *allocate(size_t capacity) {
    struct packet *p = malloc(sizeof *p + capacity);
    if (!p) {
        fprintf(stderr, "forwarder: out of memory\n");
        exit(1);
    }
    return p;
}

static struct packet *take_buffer(void) {
    struct packet *p = spare;
    if (p)
        spare = p->next;
    else
        p = allocate((size_t)mtu);
    p->large = true;
    return p;
}

static void release(struct packet *p) {
    if (!p->large) {
        free(p);
        return;
    }
    p->next = spare;
    spare = p;
}

static void push(struct queue *q, struct packet *p) {
    p->next = NULL;
    if (q->head)
        q->tail->next = p;
    else
        q->head = p;
    q->tail = p;
    q->bytes += p->length;
}

static struct packet *pop(struct queue *q) {
    struct packet *p = q->head;
    q->head = p->next;
    q->bytes -= p->length;
    return p;
}

/* The NIC that owns the packet's destination, or -1 for anything that is not ours to carry. */
static int destination_of(const unsigned char *bytes, ssize_t length) {
    uint32_t address;
    if (length < 20 || bytes[0] >> 4 != 4)
        return -1;
    memcpy(&address, bytes + 16, 4);
    address = ntohl(address);
    if (address >> 16 != network_bits)
        return -1;
    return (int)nic_of_low_bits[address & 0xffff] - 1;
}

/* Egress: take waiting packets of one NIC and put each on the wire behind its predecessors. */
static void accept_from(struct nic *nic) {
    for (int i = 0; i < READ_BATCH; i++) {
        struct packet *p = take_buffer();
        ssize_t length = read(nic->fd, p->bytes, (size_t)mtu);
        if (length <= 0) {
            release(p);
            return;
        }
        int destination = destination_of(p->bytes, length);
        if (destination < 0) {
            foreign_packets++;
            release(p);
            continue;
        }
        if (length <= SMALL_BYTES) {
            struct packet *small = allocate((size_t)length);
            memcpy(small->bytes, p->bytes, (size_t)length);
            small->large = false;
            release(p);
            p = small;
        }
        p->length = (int32_t)length;
        p->destination = (uint16_t)destination;
        nic->sent_packets++;
        nic->sent_bytes += length;
        int64_t start = later(clock_ns(), nic->egress_free);
        if (nic->cut || nic->wire.bytes + length > queue_limit_bytes) {
            nic->dropped_packets++;
            release(p);
            continue;
        }
        nic->egress_free = start + wire_time(p);
        p->when = start + latency_ns;
        push(&nic->wire, p);
    }
}

/* Ingress: packets whose first bit has arrived by `now`, in order of arrival over all senders, queue at their NIC. */
static void land(int64_t now) {
    for (;;) {
        struct nic *first = NULL;
        for (int i = 0; i < num_nics; i++)
            if (nics[i].wire.head && nics[i].wire.head->when <= now &&
                (!first || nics[i].wire.head->when < first->wire.head->when))
                first = &nics[i];
        if (!first)
            return;
        struct packet *p = pop(&first->wire);
        struct nic *nic = &nics[p->destination];
        if (nic->cut || nic->inbox.bytes + p->length > queue_limit_bytes) {
            nic->dropped_packets++;
            release(p);
            continue;
        }
        p->when = later(p->when, nic->ingress_free) + wire_time(p);
        nic->ingress_free = p->when;
        push(&nic->inbox, p);
        nic->peak_queue_bytes = later(nic->peak_queue_bytes, nic->inbox.bytes);
    }
}

static void note_lateness(int64_t late_ns) {
    int bucket = 0;
    for (int64_t us = late_ns / 1000; us > 0 && bucket < LATE_BUCKETS - 1; us >>= 1)
        bucket++;
    late_counts[bucket]++;
    late_max_ns = later(late_max_ns, late_ns);
}

static void deliver(int64_t now) {
    for (int i = 0; i < num_nics; i++) {
        struct nic *nic = &nics[i];
        while (nic->inbox.head && nic->inbox.head->when <= now + EARLY_NS) {
            struct packet *p = pop(&nic->inbox);
            note_lateness(later(0, now - p->when));
            if (write(nic->fd, p->bytes, (size_t)p->length) == p->length) {
                nic->received_packets++;
                nic->received_bytes += p->length;
            } else {
                nic->dropped_packets++;
            }
            release(p);
        }
    }
}

/* A packet on the wire cannot be due before its arrival plus its own length: one wake-up serves both stages. */
static int64_t next_event(void) {
    int64_t next = NEVER;
    for (int i = 0; i < num_nics; i++) {
        const struct packet *on_wire = nics[i].wire.head, *arrived = nics[i].inbox.head;
        if (on_wire && on_wire->when + wire_time(on_wire) < next)
            next = on_wire->when + wire_time(on_wire);
        if (arrived && arrived->when < next)
            next = arrived->when;
    }
    return next;
}

static void print_counters(void) {
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    double cpu = (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
                 1e-6 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
    printf("{\"cpu_seconds\": %.6f, \"foreign_packets\": %lld, \"late_us_max\": %lld, \"late_histogram\": [", cpu,
           (long long)foreign_packets, (long long)(late_max_ns / 1000));
    for (int b = 0; b < LATE_BUCKETS; b++)
        printf("%s%lld", b ? ", " : "", (long long)late_counts[b]);
    printf("], \"nics\": [");
    for (int i = 0; i < num_nics; i++)
        printf("%s{\"sent_packets\": %lld, \"sent_bytes\": %lld, \"received_packets\": %lld, "
               "\"received_bytes\": %lld, \"dropped_packets\": %lld, \"peak_queue_bytes\": %lld}",
               i ? ", " : "", (long long)nics[i].sent_packets, (long long)nics[i].sent_bytes,
               (long long)nics[i].received_packets, (long long)nics[i].received_bytes,
               (long long)nics[i].dropped_packets, (long long)nics[i].peak_queue_bytes);
    printf("]}\n");
    fflush(stdout);
    late_max_ns = 0; /* the worst since the last report; everything else counts on */
}

/* True when the laboratory has closed its end. */
static bool obey_stdin(void) {
    char text[4096];
    ssize_t length = read(STDIN_FILENO, text, sizeof text - 1);
    if (length <= 0)
        return length == 0;
    text[length] = 0;
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        int index = -1;
        if (sscanf(line, "cut %d", &index) == 1 && index >= 0 && index < num_nics)
            nics[index].cut = true;
        else if (sscanf(line, "join %d", &index) == 1 && index >= 0 && index < num_nics)
            nics[index].cut = false;
    }
    return false;
}

/* Hardware does not wait for a turn on the CPU: run ahead of the ranks, and without timer slack. */
static void run_like_hardware(void) {
    struct sched_param parameter = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_FIFO, &parameter) != 0)
        setpriority(PRIO_PROCESS, 0, -20);
    prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
}

static void add_nic(const char *text) {
    char address[64];
    struct in_addr parsed;
    int fd;
    if (num_nics == MAX_NICS || sscanf(text, "%d:%63s", &fd, address) != 2 || inet_aton(address, &parsed) == 0) {
        fprintf(stderr, "forwarder: bad NIC '%s'\n", text);
        exit(2);
    }
    network_bits = ntohl(parsed.s_addr) >> 16;
    nics[num_nics++].fd = fd;
    nic_of_low_bits[ntohl(parsed.s_addr) & 0xffff] = (uint16_t)num_nics;
}

int main(int argc, char **argv) {
    if (argc < 6) {
        fprintf(stderr, "usage: forwarder LATENCY_NS BYTES_PER_SECOND QUEUE_BYTES MTU FD:ADDRESS ...\n");
        return 2;
    }
    double bytes_per_second = atof(argv[2]);
    latency_ns = atoll(argv[1]);
    ns_per_byte = bytes_per_second > 0 ? 1e9 / bytes_per_second : 0; /* 0 means no limit */
    queue_limit_bytes = atoll(argv[3]);
    mtu = atoi(argv[4]);
    for (int i = 5; i < argc; i++)
        add_nic(argv[i]);

    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR1);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    int signal_fd = signalfd(-1, &signals, 0);

    static struct pollfd polls[MAX_NICS + 2];
    for (int i = 0; i < num_nics; i++)
        polls[i] = (struct pollfd){.fd = nics[i].fd, .events = POLLIN};
    polls[num_nics] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    polls[num_nics + 1] = (struct pollfd){.fd = signal_fd, .events = POLLIN};
    run_like_hardware();
    printf("{\"ready\": %d}\n", num_nics);
    fflush(stdout);

    for (int64_t round = 0;;) {
        sleep_until(round + COALESCE_NS);
        round = clock_ns();
        land(round + EARLY_NS);
        deliver(round);
        int64_t next = next_event();
        struct timespec timeout = as_timespec(next == NEVER ? 0 : later(0, next - EARLY_NS - clock_ns()));
        if (ppoll(polls, (nfds_t)num_nics + 2, next == NEVER ? NULL : &timeout, NULL) <= 0)
            continue;
        for (int i = 0; i < num_nics; i++) {
            if (polls[i].revents & POLLIN)
                accept_from(&nics[i]);
            else if (polls[i].revents)
                polls[i].fd = -1; /* the device is gone; polling it again would spin */
        }
        if (polls[num_nics].revents && obey_stdin())
            break;
        if (polls[num_nics + 1].revents & POLLIN) {
            struct signalfd_siginfo info;
            if (read(signal_fd, &info, sizeof info) != sizeof info || info.ssi_signo != SIGUSR1)
                break;
            print_counters();
        }
    }
    print_counters();
    return 0;
}
