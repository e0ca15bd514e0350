package controlplane

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/gossip"
	"github.com/dunlin-project/dunlin/wire"
)

// Paths of an administrator about the network.
const (
	NetCheckPath   = "/dunlin.dev/v1/net-check"
	RotateKeysPath = "/dunlin.dev/v1/rotate-gossip-keys"
)

// NetCheckReply is what every server and every connected node reaches. Names
// are those of gossip addresses and of servers' addresses.
type NetCheckReply struct {
	Reports []gossip.NetReport `json:"reports"`
	Names   map[string]string  `json:"names"`
	// Rotations are the new gossip keys that are under way.
	Rotations []nodeapi.Rotation `json:"rotations,omitempty"`
}

const (
	netCheckWait = 20 * time.Second
	netCheckAsks = 32 // nodes asked at once
)

// netReport is what this server itself reaches: the other servers and its
// pool.
func (s *Server) netReport(ctx context.Context) gossip.NetReport {
	own := s.advertise()
	others := slices.DeleteFunc(s.serverAddresses(), func(a string) bool { return slices.Contains(own, a) })
	k := s.cfg.Gossip
	if k == nil {
		k = gossip.NewKeeper(gossip.KeeperConfig{}) // dials only
	}
	return k.NetCheck(ctx, s.name(s.raft.ServerID()), others)
}

func (s *Server) serveNetCheck(ctx context.Context) (wire.Message, error) {
	b, err := json.Marshal(s.netReport(ctx))
	if err != nil {
		return nil, err
	}
	return &wire.NetCheckReply{Report: b}, nil
}

// netCheck asks everybody. On the leader, to which the nodes are connected.
func (s *Server) netCheck(ctx context.Context) NetCheckReply {
	ctx, cancel := context.WithTimeout(ctx, netCheckWait)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	out := NetCheckReply{Names: map[string]string{}, Rotations: s.nodes.Rotations()}
	add := func(r gossip.NetReport) {
		mu.Lock()
		defer mu.Unlock()
		out.Reports = append(out.Reports, r)
	}
	l := s.servers()
	wg.Go(func() { add(s.netReport(ctx)) })
	for id, e := range l.entries {
		for _, a := range e.Addresses {
			out.Names[a] = e.Name
		}
		if id == s.raft.ServerID() {
			continue
		}
		wg.Go(func() {
			reply, r := new(wire.NetCheckReply), gossip.NetReport{}
			err := s.mesh.Call(ctx, id, &wire.NetCheckRequest{}, reply)
			if err == nil {
				err = json.Unmarshal(reply.Report, &r)
			}
			if err != nil {
				r.Error = err.Error()
			}
			r.From = e.Name
			add(r)
		})
	}
	slots := make(chan struct{}, netCheckAsks)
	for node, addr := range s.nodes.GossipAddresses() {
		if addr != "" {
			out.Names[addr] = node
		}
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			var r gossip.NetReport
			var b bytes.Buffer
			err := s.nodes.NetCheck(ctx, node, &b)
			if err == nil {
				err = json.Unmarshal(b.Bytes(), &r)
			}
			if err != nil {
				r.Error = err.Error()
			}
			r.From = node
			add(r)
		})
	}
	wg.Wait()
	for _, r := range out.Reports {
		if _, known := out.Names[r.Address]; r.Address != "" && !known {
			out.Names[r.Address] = r.From
		}
	}
	slices.SortFunc(out.Reports, func(a, b gossip.NetReport) int { return strings.Compare(a.From, b.From) })
	eachOnce(out.Reports)
	return out
}

// eachOnce leaves every path in one report: a server and its node are one
// process, which is one member and has one way to every server, and both tell
// of them. Results that differ stay.
func eachOnce(reports []gossip.NetReport) {
	type way struct {
		from string
		to   gossip.Dial
	}
	members, ways := map[string]bool{}, map[way]bool{}
	for i := range reports {
		r := &reports[i]
		if r.Address != "" && members[r.Address] {
			r.Members = nil
		}
		members[r.Address] = true
		from := cmp.Or(r.Address, r.From) // a member's address is a process's
		r.Servers = slices.DeleteFunc(r.Servers, func(d gossip.Dial) bool {
			w := way{from, d}
			known := ways[w]
			ways[w] = true
			return known
		})
	}
}

func (s *Server) getNetCheck(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if leader, _ := s.raft.Leader(); leader == "" {
		w.Header().Add("Warning", `299 - "no server leads: this is what one server reaches, and nodes were not asked"`)
	}
	_ = json.NewEncoder(w).Encode(s.netCheck(r.Context()))
}

// RotateKeysRequest names the site; "" is that of the servers.
type RotateKeysRequest struct {
	Site string `json:"site,omitempty"`
}

func (s *Server) postRotateKeys(w http.ResponseWriter, r *http.Request) {
	var req RotateKeysRequest
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<10))
	d.DisallowUnknownFields()
	if err := d.Decode(&req); err != nil {
		writeStatus(w, apierrors.NewBadRequest("rotate gossip keys: "+err.Error()))
		return
	}
	if req.Site == "" {
		req.Site = s.zone()
	}
	if err := s.nodes.RotateKeyring(r.Context(), req.Site, false); err != nil {
		if errors.Is(err, nodeapi.ErrNoSite) {
			writeStatus(w, apierrors.NewBadRequest("rotate gossip keys: "+err.Error()))
			return
		}
		writeStatus(w, apierrors.NewInternalError(err))
		return
	}
	s.log.Info("new gossip keys: members learn them, then use them; the ones before are understood for an hour more", "site", req.Site)
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(req)
}
