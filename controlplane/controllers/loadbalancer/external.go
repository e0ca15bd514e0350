package loadbalancer

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Reasons of the events about spec.externalIPs.
const (
	reasonNotServed = "ExternalIPNotServed"
	reasonServed    = "ExternalIPServed"
)

// tellExternal says which of a Service's external addresses no node has, and
// when that is over. Nodes listen on their own addresses alone.
func (c *controller) tellExternal(key state.Key, svc *corev1.Service) {
	var missing []string
	if len(svc.Spec.ExternalIPs) > 0 && svc.DeletionTimestamp == nil {
		missing = nowhere(svc.Spec.ExternalIPs, c.nodes())
	}
	text := strings.Join(missing, ", ")
	c.mu.Lock()
	was := c.told[key]
	if c.told[key] = text; text == "" {
		delete(c.told, key)
	}
	c.mu.Unlock()
	switch {
	case text == was:
	case text != "":
		c.env.Events.Event(about(svc), corev1.EventTypeWarning, reasonNotServed, fmt.Sprintf(
			"no node has %s, so nothing answers there: an address in spec.externalIPs is served by the node whose InternalIP it is ('dunlin get nodes -o wide'); name such an address, or use type LoadBalancer, which gets them by itself", text))
	case len(svc.Spec.ExternalIPs) > 0:
		c.env.Events.Event(about(svc), corev1.EventTypeNormal, reasonServed, "each of spec.externalIPs is the address of a node now")
	}
}

// nowhere are the addresses that no node has. While there is no node at all
// nothing is known. Pure.
func nowhere(ips []string, nodes []*corev1.Node) (out []string) {
	if len(nodes) == 0 {
		return nil
	}
	has := map[netip.Addr]bool{}
	for _, n := range nodes {
		for _, a := range n.Status.Addresses {
			if ip, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
				has[ip.Unmap()] = true
			}
		}
	}
	for _, s := range ips {
		if ip, err := netip.ParseAddr(s); err == nil && !has[ip.Unmap()] && !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}
