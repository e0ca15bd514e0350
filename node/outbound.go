package node

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/internal/outbound"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// dnsServersMost is how many servers a guest's names are asked of.
const dnsServersMost = 4

// outbound is a Wasm guest's way out: what the pod's annotation allows, and the
// node's DNS, then the machine's own servers where that does not answer.
func (a *Agent) outbound(pod *corev1.Pod, allow string) (workload.Outbound, error) {
	if _, err := outbound.Parse(allow); err != nil {
		return workload.Outbound{}, fmt.Errorf("annotation %s %w", manifests.AnnotationOutbound, err)
	}
	out := workload.Outbound{Allow: allow}
	for _, ip := range a.c.ClusterDNS() {
		out.DNS = append(out.DNS, netip.AddrPortFrom(ip, 53).String())
	}
	for _, ip := range nameservers("/etc/resolv.conf") {
		out.DNS = append(out.DNS, net.JoinHostPort(ip, "53"))
	}
	out.DNS = out.DNS[:min(len(out.DNS), dnsServersMost)]
	if d := a.c.ClusterDomain; d != "" {
		out.Search = []string{pod.Namespace + ".svc." + d, "svc." + d, d}
	}
	return out, nil
}

// nameservers reads those of a resolv.conf.
func nameservers(path string) (out []string) {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }()
	for s := bufio.NewScanner(f); s.Scan(); {
		w := strings.Fields(s.Text())
		if len(w) < 2 || w[0] != "nameserver" {
			continue
		}
		if ip, err := netip.ParseAddr(w[1]); err == nil && ip.Zone() == "" {
			out = append(out, ip.String())
		}
	}
	return out
}

// tellRefused makes one event of all that a guest was refused; another one
// only once there is more.
func (w *worker) tellRefused(c *ctrState, list []workload.Refusal) {
	if len(list) == 0 {
		return
	}
	whats, entries := make([]string, len(list)), make([]string, len(list))
	for i, r := range list {
		whats[i], entries[i] = r.What+" ("+r.Why+")", r.Entry
	}
	slices.Sort(entries)
	text := fmt.Sprintf("refused: %s; to allow it, annotate the pod with %s: %q", strings.Join(whats, "; "), outbound.Annotation, strings.Join(slices.Compact(entries), ", "))
	if strings.Contains(text, ":"+outbound.AnyPort) {
		text += ", where " + outbound.AnyPort + " is the one that the guest connects to"
	}
	if text == w.refused {
		return
	}
	w.refused = text
	w.event(note{warning: true, reason: "OutboundRefused", container: c.rec.Name, init: c.init, message: text})
}
