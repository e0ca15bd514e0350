package controlplane

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/controlplane/peers"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/wire"
)

// The list of servers is a ConfigMap, so that it is replicated, survives, and
// can be read with kubectl: an entry for each server id, and a mark for each
// that was removed. Raft's configuration says who takes part; this says who
// they are and where. It is written only when something changes.
const (
	serversNamespace = "kube-system"
	serversName      = nodeapi.ServersName
	removedPrefix    = "removed."
)

var configMapGK = schema.GroupKind{Kind: "ConfigMap"}

// serverEntry is what the list has of one server.
type serverEntry struct {
	Name      string   `json:"name"`
	Addresses []string `json:"addresses"`
	Version   string   `json:"version,omitempty"`
	Zone      string   `json:"zone,omitempty"`
}

// serverList is the decoded ConfigMap.
type serverList struct {
	entries map[string]serverEntry
	removed map[string]bool
	epoch   uint64 // recovery epoch; 0 before the first recovery
}

func (s *Server) servers() serverList {
	obj, err := s.store.Get(configMapGK, serversNamespace, serversName)
	if err != nil {
		return decodeServers(nil) // not yet
	}
	cm, ok := obj.(*corev1.ConfigMap)
	if !ok {
		return decodeServers(nil)
	}
	return decodeServers(cm.Data)
}

// decodeServers reads the list; a user may have written there, too.
func decodeServers(data map[string]string) serverList {
	l := serverList{entries: map[string]serverEntry{}, removed: map[string]bool{}}
	for k, v := range data {
		if id, ok := strings.CutPrefix(k, removedPrefix); ok {
			l.removed[id] = true
			continue
		}
		if k == epochKey {
			l.epoch, _ = strconv.ParseUint(v, 10, 64)
			continue
		}
		var e serverEntry
		if json.Unmarshal([]byte(v), &e) == nil {
			l.entries[k] = e
		}
	}
	return l
}

// removedServer is the mesh's question, before the store is there, too.
func (s *Server) removedServer(id string) bool { return s.stored.Load() && s.servers().removed[id] }

// serverAddresses lists the addresses of all servers, in an order that does
// not depend on which server says it: it is part of every node's assignment.
func (s *Server) serverAddresses() []string {
	l := s.servers()
	var out []string
	for _, id := range sortedKeys(l.entries) {
		for _, a := range l.entries[id].Addresses {
			if !l.removed[id] && !slices.Contains(out, a) {
				out = append(out, a)
			}
		}
	}
	if len(out) == 0 {
		return s.advertise()
	}
	return out
}

// addressesOf are the addresses of one server, as far as they are known.
func (s *Server) addressesOf(id string) []string {
	if id == "" {
		return nil
	}
	if id == s.raft.ServerID() {
		return s.advertise()
	}
	if a := s.book.Resolve(id); len(a) > 0 {
		return a
	}
	return s.servers().entries[id].Addresses
}

// leaderAddresses are those of another server that leads.
func (s *Server) leaderAddresses() ([]string, <-chan struct{}) {
	id, changed := s.raft.Leader()
	if id == s.raft.ServerID() {
		return nil, changed // not ready yet
	}
	return s.addressesOf(id), changed
}

// toLeader opens a connection to the server that leads.
func (s *Server) toLeader(ctx context.Context) (net.Conn, error) {
	id, _ := s.raft.Leader()
	if id == "" || id == s.raft.ServerID() {
		return nil, errors.New("no server leads at the moment")
	}
	return s.mesh.Raw(ctx, id)
}

func sortedKeys[V any](m map[string]V) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// changeServers writes the list, if it differs.
func (s *Server) changeServers(ctx context.Context, change func(data map[string]string)) error {
	for range 3 {
		_, err := s.store.Update(ctx, configMapGK, serversNamespace, serversName, registry.Main, func(o runtime.Object) (runtime.Object, error) {
			cm, ok := o.(*corev1.ConfigMap)
			if !ok {
				return nil, fmt.Errorf("the list of servers is a %T", o)
			}
			if cm.Data == nil {
				cm.Data = map[string]string{}
			}
			change(cm.Data)
			return cm, nil
		}, registry.WriteOptions{})
		if !apierrors.IsNotFound(err) {
			return err
		}
		data := map[string]string{}
		change(data)
		_, err = s.store.Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: serversNamespace, Name: serversName}, Data: data,
		}, registry.WriteOptions{})
		if !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	return errors.New("the list of servers is being changed by somebody else")
}

const (
	announceEvery   = 5 * time.Second
	announceTimeout = 20 * time.Second
)

// announce makes the cluster know this server and its addresses: at first,
// whenever they change, and when somebody took the entry away. In between it
// only looks at the state in memory.
func (s *Server) announce(ctx context.Context) error {
	said, failed := "", 0
	for {
		_, changed := s.raft.Leader()
		_, _, moved := s.place.get()
		s.forgetRemoved()
		if !s.known() {
			err := s.sayWhoIAm(ctx)
			switch {
			case err == nil:
				said, failed = "", 0
			case ctx.Err() != nil:
			default:
				// The first moments of a cluster, or of an election, are not worth a
				// line.
				if failed++; failed > 2 && err.Error() != said {
					said = err.Error()
					s.log.Info("the cluster does not know this server yet", "err", err, "again_in", announceEvery)
				}
			}
		}
		t := time.NewTimer(announceEvery)
		select {
		case <-changed:
		case <-moved:
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil
		}
		t.Stop()
	}
}

// forgetRemoved takes servers that were removed, or given up by a recovery,
// out of this server's address book and that of gossip: nobody shall look for
// them any more.
func (s *Server) forgetRemoved() {
	for id := range s.servers().removed {
		if id == s.raft.ServerID() {
			continue
		}
		if s.cfg.Gossip != nil {
			s.cfg.Gossip.ForgetServer(id)
		}
		if err := s.book.Set(id, nil); err != nil {
			s.log.Warn("a removed server is still in the address book", "server", id, "err", err)
		}
	}
}

// known says whether list and Raft's configuration have this server as it is.
func (s *Server) known() bool {
	id := s.raft.ServerID()
	members, _, err := s.raft.Members()
	if err != nil || !slices.ContainsFunc(members, func(m consensus.Member) bool { return m.ID == id }) {
		return false
	}
	e, ok := s.servers().entries[id]
	return ok && sameEntry(e, s.self())
}

func sameEntry(a, b serverEntry) bool {
	// The name may have got a suffix.
	return strings.HasPrefix(a.Name, b.Name) && slices.Equal(a.Addresses, b.Addresses) && a.Version == b.Version && a.Zone == b.Zone
}

func (s *Server) self() serverEntry {
	return serverEntry{Name: s.name(s.raft.ServerID()), Addresses: s.advertise(), Version: s.cfg.Version, Zone: s.cfg.Zone}
}

// sayWhoIAm tells the leader, or whoever knows it.
func (s *Server) sayWhoIAm(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, announceTimeout)
	defer cancel()
	me := s.self()
	if _, leading := s.raft.Leadership(); leading {
		return s.announced(ctx, s.raft.ServerID(), me)
	}
	req := &wire.AnnounceRequest{Name: me.Name, Addresses: me.Addresses, Build: me.Version, Zone: me.Zone}
	var errs []error
	for _, id := range s.others() {
		reply := new(wire.AnnounceReply)
		err := s.mesh.Call(ctx, id, req, reply)
		switch {
		case err != nil:
			errs = append(errs, err)
			continue
		case reply.Removed:
			s.fencedOut(cmp.Or(s.servers().entries[id].Name, id), 0)
		}
		if reply.Refused != "" {
			return fmt.Errorf("server %s: %s", id, reply.Refused)
		}
		return nil
	}
	if len(errs) == 0 {
		return errors.New("no other server is known; give the address of one with --peers")
	}
	return errors.Join(errs...)
}

// others are the known servers to ask, the leader first.
func (s *Server) others() []string {
	leader, _ := s.raft.Leader()
	out := sortedKeys(s.book.All())
	out = slices.DeleteFunc(out, func(id string) bool { return id == s.raft.ServerID() })
	slices.SortStableFunc(out, func(a, b string) int {
		return cmp.Compare(btoi(a != leader), btoi(b != leader))
	})
	return out
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// serveAnnounce takes another server's word of who and where it is.
func (s *Server) serveAnnounce(ctx context.Context, from string, r *wire.AnnounceRequest) (wire.Message, error) {
	id := cmp.Or(r.ID, from)
	if s.removedServer(id) {
		return &wire.AnnounceReply{Removed: true, Refused: "it was removed from the cluster; remove its state and join it again"}, nil
	}
	if _, leading := s.raft.Leadership(); leading {
		e := serverEntry{Name: r.Name, Addresses: r.Addresses, Version: r.Build, Zone: r.Zone}
		if err := s.announced(ctx, id, e); err != nil {
			return &wire.AnnounceReply{Refused: err.Error()}, nil
		}
		return &wire.AnnounceReply{}, nil
	}
	leader, _ := s.raft.Leader()
	if leader == "" || leader == s.raft.ServerID() || r.ID != "" {
		return nil, &wire.Fault{Code: wire.FaultNotLeader, Message: "no server leads at the moment"}
	}
	passed := *r
	passed.ID = id
	reply := new(wire.AnnounceReply)
	return reply, s.mesh.Call(ctx, leader, &passed, reply)
}

// maxServers bounds the list.
const maxServers = 32

// announced keeps what a server says of itself, and takes it into the
// cluster: without a vote at first, see voters. On the leader.
func (s *Server) announced(ctx context.Context, id string, e serverEntry) error {
	if len(e.Addresses) == 0 || e.Name == "" {
		return errors.New("it told no name or no address")
	}
	l := s.servers()
	if l.removed[id] {
		return errors.New("it was removed from the cluster")
	}
	if _, ok := l.entries[id]; !ok && len(l.entries) >= maxServers {
		return fmt.Errorf("there are %d servers, and no more are taken", maxServers)
	}
	if id != s.raft.ServerID() {
		if err := s.book.Set(id, e.Addresses); err != nil {
			return err
		}
	}
	e.Name = freeName(l.entries, id, e.Name)
	b, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	if err := s.changeServers(ctx, func(data map[string]string) { data[id] = string(b) }); err != nil {
		return err
	}
	members, index, err := s.raft.Members()
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(members, func(m consensus.Member) bool { return m.ID == id }) {
		if err := s.raft.AddNonvoter(id, index); err != nil {
			return err
		}
		s.log.Info("a server was added; it has no vote yet", "server", e.Name, "id", id, "addresses", e.Addresses)
		if onlyThisMachine(e.Addresses) && !onlyThisMachine(s.advertise()) {
			s.log.Warn("the new server told an address that other machines cannot reach; start it with --advertise", "server", e.Name, "addresses", e.Addresses)
		}
	}
	s.wakeVoters()
	return nil
}

// freeName is the wanted name, with a suffix where another server has it.
func freeName(entries map[string]serverEntry, id, want string) string {
	name := want
	for other, e := range entries {
		if other != id && e.Name == want {
			name = want + "-" + id[:min(5, len(id))]
		}
	}
	return name
}

func onlyThisMachine(addrs []string) bool {
	for _, a := range addrs {
		host, _, err := net.SplitHostPort(a)
		if err != nil {
			return false
		}
		ip, err := netip.ParseAddr(host)
		if (err != nil && host != "localhost") || (err == nil && !ip.IsLoopback()) {
			return false
		}
	}
	return true
}

// ErrNoSuchServer says that no server has the name.
var ErrNoSuchServer = errors.New("no such server")

// removeServer marks a server as removed, for good; the leader then takes it
// out. On the leader.
func (s *Server) removeServer(ctx context.Context, name string) (serverEntry, error) {
	l := s.servers()
	members, _, err := s.raft.Members()
	if err != nil {
		return serverEntry{}, err
	}
	id, e, err := findServer(l, members, name)
	if err != nil {
		return e, err
	}
	voters := 0
	for _, m := range members {
		if m.Voter && m.ID != id {
			voters++
		}
	}
	if voters == 0 {
		return e, fmt.Errorf("server %s is the only one that votes: add others first", e.Name)
	}
	if id == s.raft.ServerID() {
		// It must not be the one that removes itself.
		if err := s.raft.HandOver(); err != nil {
			return e, err
		}
		return e, errHandedOver
	}
	stamp := s.cfg.Clock.Now().UTC().Format(time.RFC3339)
	err = s.changeServers(ctx, func(data map[string]string) {
		delete(data, id)
		data[removedPrefix+id] = stamp
	})
	if err != nil {
		return e, err
	}
	s.log.Warn("server removed", "server", e.Name, "id", id)
	s.wakeVoters()
	return e, s.book.Set(id, nil)
}

var errHandedOver = errors.New("another server leads now")

// findServer takes a name, an id, or the beginning of an id.
func findServer(l serverList, members []consensus.Member, name string) (string, serverEntry, error) {
	var found []string
	for id, e := range l.entries {
		if e.Name == name || id == name {
			return id, e, nil
		}
		if len(name) >= 5 && strings.HasPrefix(id, name) {
			found = append(found, id)
		}
	}
	for _, m := range members { // one without an entry
		if _, ok := l.entries[m.ID]; !ok && len(name) >= 5 && strings.HasPrefix(m.ID, name) {
			found = append(found, m.ID)
		}
	}
	if len(found) != 1 {
		return "", serverEntry{}, fmt.Errorf("%w: %q (see 'dunlin server list')", ErrNoSuchServer, name)
	}
	e := l.entries[found[0]]
	e.Name = cmp.Or(e.Name, found[0])
	return found[0], e, nil
}

var _ peers.Serve = (*Server)(nil).serveServer
