package sim

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire/memnet"
)

// client is a user of the API over HTTPS. It is a careful one: every write
// carries the version it is about, and after a write whose outcome it did not
// hear it reads again. So it always
// knows what the object may look like.
type client struct {
	w    *world
	name string
	http *http.Client
	at   atomic.Int64 // the server that is asked
	// probe is the period of readiness probes, in seconds.
	probe int32
}

func (w *world) newClient(name string) (*client, error) {
	ca, err := pki.LoadCA(filepath.Join(w.servers[0].dir, "pki"), w.servers[0].clock)
	if err != nil {
		return nil, err
	}
	cert, key, err := ca.IssueUser(name, []string{pki.MastersGroup}, pki.AdminLife)
	if err != nil {
		return nil, err
	}
	return &client{w: w, name: name, probe: 5, http: &http.Client{
		Timeout: 10 * time.Second,
		Transport: &http.Transport{
			DialContext: w.dialer(memnet.Addr(name)),
			TLSClientConfig: &tls.Config{
				RootCAs: ca.Pool(), Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}},
				Time: w.newWall().Now, MinVersion: tls.VersionTLS13,
			},
		},
	}}, nil
}

func (c *client) close() { c.http.CloseIdleConnections() }

// outcome of a request.
type outcome int

const (
	done outcome = iota
	refused
	unknown // it may have happened, now or never
)

var errStale = errors.New("served without a quorum")

// call makes one request to one server.
func (c *client) call(ctx context.Context, method, path, contentType string, in, out any) (outcome, int, error) {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return refused, 0, err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "https://"+string(c.target())+path, body)
	if err != nil {
		return refused, 0, err
	}
	req.Header.Set("Content-Type", contentType)
	resp, err := c.http.Do(req)
	if err != nil {
		c.http.CloseIdleConnections()
		c.at.Add(1) // another server next time
		return unknown, 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return unknown, 0, err
	}
	switch {
	case resp.StatusCode >= 500:
		c.at.Add(1)
		return unknown, resp.StatusCode, fmt.Errorf("%s: %s", resp.Status, short(b))
	case method == http.MethodGet && len(resp.Header.Values("Warning")) > 0:
		return unknown, resp.StatusCode, errStale // also that there is none
	case resp.StatusCode >= 400:
		return refused, resp.StatusCode, fmt.Errorf("%s: %s", resp.Status, short(b))
	}
	if out != nil {
		return done, resp.StatusCode, json.Unmarshal(b, out)
	}
	return done, resp.StatusCode, nil
}

func short(b []byte) string { return strings.TrimSpace(string(b[:min(len(b), 300)])) }

// target is the server that the client asks: any, until it fails.
func (c *client) target() memnet.Addr { return c.w.servers[int(c.at.Load())%len(c.w.servers)].addr }

// want is what an object shall look like.
type want struct {
	exists   bool
	seq      string
	image    string
	replicas int32
}

func (v want) String() string {
	if !v.exists {
		return "absent"
	}
	return fmt.Sprintf("seq %s, %s x %d", v.seq, v.image, v.replicas)
}

// keeper owns one object that a client writes.
type keeper struct {
	c    *client
	path string // of its collection
	name string
	is   want // as it was read, or acknowledged, last
	// tries are writes whose outcome was not heard. One may still happen, much
	// later even, as long as what it depends on is so.
	tries []try
	n     int // writes so far
	// read makes a want of the object's JSON, write the other way round.
	read  func(b json.RawMessage) (want, metav1.ObjectMeta, error)
	write func(v want, meta metav1.ObjectMeta) any
	acked int
}

// try is a write with what it depends on: a version, or "" for absence.
type try struct {
	to      want
	version string
}

// now takes in what the object is; only tries that it still allows remain.
func (k *keeper) now(v want, version string) {
	k.is = v
	var rest []try
	for _, t := range k.tries {
		if t.to != v && (t.version == "" || t.version == version) {
			rest = append(rest, t)
		}
	}
	k.tries = rest
}

const (
	seqAnnotation = "sim/seq"
	mergePatch    = "application/merge-patch+json"
	jsonType      = "application/json"
)

// look reads until a server answers for sure, and checks the answer.
func (k *keeper) look(ctx context.Context) (want, metav1.ObjectMeta, error) {
	for {
		var raw json.RawMessage
		got, meta := want{}, metav1.ObjectMeta{}
		o, code, err := k.c.call(ctx, http.MethodGet, k.path+"/"+k.name, jsonType, nil, &raw)
		switch {
		case o == done && err == nil:
			if got, meta, err = k.read(raw); err != nil {
				return got, meta, err
			}
		case o == refused && code == http.StatusNotFound: // and not stale
		default:
			if pause(ctx, time.Second) != nil {
				return got, meta, errors.Join(ctx.Err(), err)
			}
			continue
		}
		ok := got == k.is
		for _, t := range k.tries {
			ok = ok || t.to == got
		}
		if !ok {
			k.c.w.violated("%s/%s is %v; it was %v, and may be %v: an acknowledged write is lost", k.path, k.name, got, k.is, k.tries)
		}
		k.now(got, meta.ResourceVersion)
		return got, meta, nil
	}
}

// put brings the object to v; v.exists false deletes it. It returns once the
// write is acknowledged, or, with once, after one try.
func (k *keeper) put(ctx context.Context, v want, once bool) error {
	k.n++
	v.seq = fmt.Sprint(k.n)
	if !v.exists {
		v = want{}
	}
	for {
		cur, meta, err := k.look(ctx)
		if err != nil {
			return err
		}
		if cur == v || (!cur.exists && !v.exists) {
			return nil // an earlier try worked
		}
		o, err := k.send(ctx, cur, v, meta)
		switch o {
		case done:
			k.now(v, "changed")
			k.acked++
			k.c.w.say("%s: %s is %v", k.c.name, k.name, v)
			return nil
		case unknown:
			k.tries = append(k.tries, try{v, meta.ResourceVersion})
		}
		k.c.w.say("%s: %s to %v: %v", k.c.name, k.name, v, err)
		if once && o == unknown {
			return nil
		}
		if err := pause(ctx, 500*time.Millisecond); err != nil {
			return err
		}
	}
}

func (k *keeper) send(ctx context.Context, cur, v want, meta metav1.ObjectMeta) (outcome, error) {
	switch {
	case !v.exists:
		o, code, err := k.c.call(ctx, http.MethodDelete, k.path+"/"+k.name, jsonType, &metav1.DeleteOptions{
			TypeMeta:      metav1.TypeMeta{Kind: "DeleteOptions", APIVersion: "v1"},
			Preconditions: &metav1.Preconditions{UID: &meta.UID, ResourceVersion: &meta.ResourceVersion},
		}, nil)
		if code == http.StatusNotFound {
			return done, nil
		}
		return o, err
	case !cur.exists:
		o, _, err := k.c.call(ctx, http.MethodPost, k.path, jsonType, k.write(v, metav1.ObjectMeta{}), nil)
		return o, err
	}
	o, _, err := k.c.call(ctx, http.MethodPatch, k.path+"/"+k.name, mergePatch, k.write(v, meta), nil)
	return o, err
}

// newApp is a Deployment under a client's care.
func (c *client) newApp(name string, surge, unavailable int) *keeper {
	return &keeper{c: c, path: "/apis/apps/v1/namespaces/default/deployments", name: name,
		read: func(b json.RawMessage) (want, metav1.ObjectMeta, error) {
			var d appsv1.Deployment
			if err := json.Unmarshal(b, &d); err != nil {
				return want{}, metav1.ObjectMeta{}, err
			}
			return want{exists: true, seq: d.Annotations[seqAnnotation], image: d.Spec.Template.Spec.Containers[0].Image, replicas: *d.Spec.Replicas}, d.ObjectMeta, nil
		},
		write: func(v want, meta metav1.ObjectMeta) any {
			if meta.UID == "" {
				return c.deployment(name, v, surge, unavailable)
			}
			container := map[string]any{"name": "c", "image": v.image, "resources": requests(), "readinessProbe": c.readiness()}
			return map[string]any{
				"metadata": map[string]any{"resourceVersion": meta.ResourceVersion, "annotations": map[string]string{seqAnnotation: v.seq}},
				"spec":     map[string]any{"replicas": v.replicas, "template": map[string]any{"spec": map[string]any{"containers": []any{container}}}},
			}
		},
	}
}

func requests() corev1.ResourceRequirements {
	return corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("100m"), "memory": resource.MustParse("64Mi")}}
}

func (c *client) readiness() *corev1.Probe {
	return &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(8080)}}, PeriodSeconds: c.probe, TimeoutSeconds: 1}
}

func (c *client) deployment(name string, v want, surge, unavailable int) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	s, u := intstr.FromInt(surge), intstr.FromInt(unavailable)
	return &appsv1.Deployment{
		TypeMeta:   metav1.TypeMeta{APIVersion: "apps/v1", Kind: "Deployment"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Annotations: map[string]string{seqAnnotation: v.seq}},
		Spec: appsv1.DeploymentSpec{
			Replicas: &v.replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Strategy: appsv1.DeploymentStrategy{Type: appsv1.RollingUpdateDeploymentStrategyType, RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: &s, MaxUnavailable: &u}},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels, Annotations: map[string]string{"dunlin.dev/placement": "spread"}}, Spec: corev1.PodSpec{
				Containers: []corev1.Container{{Name: "c", Image: v.image, Resources: requests(), ReadinessProbe: c.readiness()}},
			}},
		},
	}
}

// newConfig is a ConfigMap under a client's care.
func (c *client) newConfig(name string) *keeper {
	return &keeper{c: c, path: "/api/v1/namespaces/default/configmaps", name: name,
		read: func(b json.RawMessage) (want, metav1.ObjectMeta, error) {
			var m corev1.ConfigMap
			err := json.Unmarshal(b, &m)
			return want{exists: true, seq: m.Data["seq"]}, m.ObjectMeta, err
		},
		write: func(v want, meta metav1.ObjectMeta) any {
			if meta.UID == "" {
				return &corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Data: map[string]string{"seq": v.seq}}
			}
			return map[string]any{"metadata": map[string]any{"resourceVersion": meta.ResourceVersion}, "data": map[string]string{"seq": v.seq}}
		},
	}
}

// killPod deletes one pod of an app.
func (c *client) killPod(ctx context.Context, app string, which int) {
	var list corev1.PodList
	o, _, err := c.call(ctx, http.MethodGet, "/api/v1/namespaces/default/pods?labelSelector=app%3D"+app, jsonType, nil, &list)
	if o != done || err != nil || len(list.Items) == 0 {
		return
	}
	p := list.Items[which%len(list.Items)]
	c.w.check.free(string(p.UID))
	c.w.say("%s: deletes pod %s", c.name, p.Name)
	_, _, _ = c.call(ctx, http.MethodDelete, "/api/v1/namespaces/default/pods/"+p.Name, jsonType, &metav1.DeleteOptions{
		TypeMeta: metav1.TypeMeta{Kind: "DeleteOptions", APIVersion: "v1"}, Preconditions: &metav1.Preconditions{UID: &p.UID}}, nil)
}
