package cli

import (
	"slices"
	"testing"

	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/services"
	"github.com/dunlin-project/dunlin/wire"
)

func TestServiceVariables(t *testing.T) {
	got := serviceVariables("my-db", wire.Service{ClusterIPs: []string{"10.43.0.9", "fd00::9"}, Ports: []wire.ServicePort{
		{Name: "sql-in", Protocol: "TCP", Port: 5432}, {Name: "stats", Protocol: "UDP", Port: 90},
	}})
	want := [][2]string{
		{"MY_DB_SERVICE_HOST", "10.43.0.9"}, {"MY_DB_SERVICE_PORT", "5432"},
		{"MY_DB_SERVICE_PORT_SQL_IN", "5432"}, {"MY_DB_SERVICE_PORT_STATS", "90"},
		{"MY_DB_PORT", "tcp://10.43.0.9:5432"},
		{"MY_DB_PORT_5432_TCP", "tcp://10.43.0.9:5432"}, {"MY_DB_PORT_5432_TCP_PROTO", "tcp"},
		{"MY_DB_PORT_5432_TCP_PORT", "5432"}, {"MY_DB_PORT_5432_TCP_ADDR", "10.43.0.9"},
		{"MY_DB_PORT_90_UDP", "udp://10.43.0.9:90"}, {"MY_DB_PORT_90_UDP_PROTO", "udp"},
		{"MY_DB_PORT_90_UDP_PORT", "90"}, {"MY_DB_PORT_90_UDP_ADDR", "10.43.0.9"},
	}
	if !slices.Equal(got, want) {
		t.Fatalf("got %q\nwant %q", got, want)
	}
	if got := serviceVariables("headless", wire.Service{Ports: []wire.ServicePort{{Port: 1}}}); got != nil {
		t.Fatalf("headless: %q", got)
	}
}

// TestServiceEnv: the API server in every namespace, others in their own.
func TestServiceEnv(t *testing.T) {
	table := services.NewTable()
	r := wire.ServicesReply{Generation: 1, Full: true}
	for key, ip := range map[string]string{"default/kubernetes": "10.43.0.1", "shop/cart": "10.43.0.2", "shopping/other": "10.43.0.3"} {
		data, err := wire.EncodeItem(&wire.Service{ClusterIPs: []string{ip}, Ports: []wire.ServicePort{{Protocol: "TCP", Port: 443}}})
		if err != nil {
			t.Fatal(err)
		}
		r.Items = append(r.Items, wire.ServiceItem{Key: wire.ItemService + key, Data: data})
		r.Digest += wire.ItemDigest(wire.ItemService+key, data)
	}
	if _, err := table.Apply(&r); err != nil {
		t.Fatal(err)
	}
	tr := &traffic{table: table, namespaced: &network.Namespaced{}}
	hosts := func(namespace string, links bool) (out []string) {
		for _, kv := range tr.env(namespace, links) {
			if n := len(kv[0]) - len("_SERVICE_HOST"); n > 0 && kv[0][n:] == "_SERVICE_HOST" {
				out = append(out, kv[0][:n]+"="+kv[1])
			}
		}
		return out
	}
	for _, c := range []struct {
		namespace string
		links     bool
		want      []string
	}{
		{"shop", true, []string{"CART=10.43.0.2", "KUBERNETES=10.43.0.1"}},
		{"shop", false, []string{"KUBERNETES=10.43.0.1"}},
		{"default", true, []string{"KUBERNETES=10.43.0.1"}},
	} {
		if got := hosts(c.namespace, c.links); !slices.Equal(got, c.want) {
			t.Errorf("%s %v: %q, want %q", c.namespace, c.links, got, c.want)
		}
	}
	tr.namespaced = nil
	if got := tr.env("shop", true); got != nil {
		t.Errorf("without root: %q", got)
	}
}
