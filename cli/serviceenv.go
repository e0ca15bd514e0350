package cli

import (
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/dunlin-project/dunlin/wire"
)

// env are the variables by which upstream tells a pod of the API server and,
// with links, of the Services in its namespace; from the node's copy of the
// table, so a Service that is made later is not among them. Nil without an
// address range: cluster addresses lead nowhere then.
func (t *traffic) env(namespace string, links bool) [][2]string {
	if t == nil || t.namespaced == nil {
		return nil
	}
	const api = wire.ItemService + "default/kubernetes"
	found := map[string]wire.Service{}
	take := func(name string, data []byte) {
		var s wire.Service
		if data != nil && wire.DecodeItem(data, &s) == nil {
			found[name] = s
		}
	}
	take("kubernetes", t.table.Get(api))
	if links {
		prefix := wire.ItemService + namespace + "/"
		t.table.Range(prefix, func(key string, data []byte) { take(strings.TrimPrefix(key, prefix), data) })
	}
	var out [][2]string
	for _, name := range slices.Sorted(maps.Keys(found)) {
		out = append(out, serviceVariables(name, found[name])...)
	}
	return out
}

// serviceVariables are those of one Service, as upstream and, before it,
// Docker's links named them.
func serviceVariables(name string, s wire.Service) [][2]string {
	if len(s.ClusterIPs) == 0 || len(s.Ports) == 0 {
		return nil
	}
	word := func(s string) string { return strings.ToUpper(strings.ReplaceAll(s, "-", "_")) }
	prefix, host := word(name), s.ClusterIPs[0]
	first := strconv.Itoa(int(s.Ports[0].Port))
	out := [][2]string{{prefix + "_SERVICE_HOST", host}, {prefix + "_SERVICE_PORT", first}}
	for _, p := range s.Ports {
		if p.Name != "" {
			out = append(out, [2]string{prefix + "_SERVICE_PORT_" + word(p.Name), strconv.Itoa(int(p.Port))})
		}
	}
	for i, p := range s.Ports {
		port, protocol := strconv.Itoa(int(p.Port)), strings.ToLower(p.Protocol)
		url := protocol + "://" + net.JoinHostPort(host, port)
		if i == 0 {
			out = append(out, [2]string{prefix + "_PORT", url})
		}
		one := prefix + "_PORT_" + port + "_" + strings.ToUpper(protocol)
		out = append(out, [2]string{one, url}, [2]string{one + "_PROTO", protocol},
			[2]string{one + "_PORT", port}, [2]string{one + "_ADDR", host})
	}
	return out
}
