package api

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// proxy passes a request on to a pod, or to one that is ready behind a
// service. What is answered where is upstream's, words included.
func (s *Server) proxy(rq *request) error {
	service := rq.kind.GVK.Kind == "Service"
	scheme, name, port, ok := utilnet.SplitSchemeNamePort(rq.info.name)
	if !ok {
		return apierrors.NewBadRequest(fmt.Sprintf("invalid %s request %q", strings.ToLower(rq.kind.GVK.Kind), rq.info.name))
	}
	full := rq.info.name
	rq.info.name = name
	var pod *corev1.Pod
	var host string
	var err error
	if service {
		pod, host, err = s.behindService(rq, full, port)
	} else {
		pod, host, err = s.ofPod(rq, port)
	}
	if err != nil {
		return err
	}
	upgrade := rq.Header.Get("Upgrade") != ""
	if rq.info.proxyPath == "" && !upgrade && (rq.Method == http.MethodGet || rq.Method == http.MethodHead) {
		// Relative addresses in what is at the root lead nowhere without it.
		to := rq.URL.EscapedPath() + "/"
		if rq.URL.RawQuery != "" {
			to += "?" + rq.URL.RawQuery
		}
		rq.w.Header().Set("Location", to)
		rq.w.WriteHeader(http.StatusMovedPermanently)
		return nil
	}
	if scheme == "" {
		scheme = "http"
	}
	if _, _, err := net.SplitHostPort(host); err != nil {
		host += map[string]string{"http": ":80", "https": ":443"}[scheme]
	}
	to, prefix := proxiedAddress(rq, full)
	to.Scheme, to.Host = scheme, host
	rq.writeWarnings()
	return s.cfg.Proxy.ServeProxy(rq.w, rq.Request, pod, to, prefix)
}

// proxiedAddress is the path and the query that the other side gets, with
// escapes as they came, and what stood before them.
func proxiedAddress(rq *request, name string) (to *url.URL, prefix string) {
	prefix = fmt.Sprintf("/api/v1/namespaces/%s/%s/%s/proxy", rq.info.namespace, rq.info.gvr.Resource, name)
	to = &url.URL{Path: rq.info.proxyPath, RawQuery: rq.URL.RawQuery}
	if to.Path == "" {
		to.Path = "/"
	}
	if raw, ok := strings.CutPrefix(rq.URL.EscapedPath(), prefix); ok {
		if p, err := url.PathUnescape(raw); err == nil && p == to.Path {
			to.RawPath = raw
		}
	}
	return to, prefix
}

// ofPod is a pod, its address and the port: the first that it declares if
// none is named.
func (s *Server) ofPod(rq *request, port string) (*corev1.Pod, string, error) {
	p, err := s.pod(rq)
	if err != nil {
		return nil, "", err
	}
	for i := range p.Spec.Containers {
		if ports := p.Spec.Containers[i].Ports; port == "" && len(ports) > 0 {
			port = strconv.Itoa(int(ports[0].ContainerPort))
		}
	}
	// Without root a pod has its node's address, which may be the loopback.
	if ip, err := netip.ParseAddr(p.Status.PodIP); err != nil || !ip.IsGlobalUnicast() && !ip.IsLoopback() {
		return nil, "", apierrors.NewBadRequest("address not allowed")
	}
	host, err := hostPort(p.Status.PodIP, port)
	return p, host, err
}

func hostPort(ip, port string) (string, error) {
	if port == "" {
		if strings.Contains(ip, ":") {
			return "[" + ip + "]", nil
		}
		return ip, nil
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", apierrors.NewBadRequest(fmt.Sprintf("%q is not the number of a port", port))
	}
	return net.JoinHostPort(ip, port), nil
}

// behindService picks a pod that is ready behind a service, and its port. The
// port of the service may be named, or numbered.
func (s *Server) behindService(rq *request, full, port string) (*corev1.Pod, string, error) {
	name := rq.info.name
	if n, err := strconv.ParseInt(port, 10, 64); err == nil {
		obj, err := s.read(rq, "")
		if err != nil {
			return nil, "", err
		}
		found := false
		if svc, ok := obj.(*corev1.Service); ok {
			for i := range svc.Spec.Ports {
				if int64(svc.Spec.Ports[i].Port) == n {
					port, found = svc.Spec.Ports[i].Name, true
					break
				}
			}
		}
		if !found {
			return nil, "", apierrors.NewServiceUnavailable(fmt.Sprintf("no service port %d found for service %q", n, name))
		}
	}
	endpoints := schema.GroupKind{Kind: "Endpoints"}
	if err := s.fresh(rq, s.cfg.Registry.ReaderFor(endpoints, rq.info.namespace), "", 0); err != nil {
		return nil, "", err
	}
	obj, err := s.cfg.Registry.Get(endpoints, rq.info.namespace, name)
	if err != nil {
		return nil, "", err
	}
	e, ok := obj.(*corev1.Endpoints)
	if !ok || len(e.Subsets) == 0 {
		return nil, "", apierrors.NewServiceUnavailable(fmt.Sprintf("no endpoints available for service %q", name))
	}
	for _, i := range rand.Perm(len(e.Subsets)) {
		sub := &e.Subsets[i]
		for _, p := range sub.Ports {
			if p.Name != port {
				continue
			}
			for _, k := range rand.Perm(len(sub.Addresses)) {
				if pod := s.podAt(rq.info.namespace, &sub.Addresses[k]); pod != nil {
					return pod, net.JoinHostPort(sub.Addresses[k].IP, strconv.Itoa(int(p.Port))), nil
				}
			}
		}
	}
	return nil, "", apierrors.NewServiceUnavailable(fmt.Sprintf("no endpoints available for service %q", full))
}

// podAt is the pod of an endpoint. Whoever writes endpoints must not make
// this server reach anything else.
func (s *Server) podAt(namespace string, a *corev1.EndpointAddress) *corev1.Pod {
	if a.TargetRef == nil || a.TargetRef.Namespace != namespace {
		return nil
	}
	obj, err := s.cfg.Registry.Get(schema.GroupKind{Kind: "Pod"}, namespace, a.TargetRef.Name)
	if err != nil {
		return nil
	}
	p, ok := obj.(*corev1.Pod)
	if !ok {
		return nil
	}
	for _, ip := range p.Status.PodIPs {
		if ip.IP == a.IP {
			return p
		}
	}
	return nil
}

// metricsText is version 0.0.4 of the Prometheus text format.
const metricsText = "text/plain; version=0.0.4; charset=utf-8"

// kubeletPort is where a kubelet listens: clients may name it.
const kubeletPort = "10250"

// proxyNode answers GET on a node's proxy. Upstream's hands out the whole
// HTTP server of a kubelet, exec included; here it is what a node tells.
func (s *Server) proxyNode(rq *request) error {
	_, name, port, ok := utilnet.SplitSchemeNamePort(rq.info.name)
	if !ok || port != "" && port != kubeletPort {
		return apierrors.NewBadRequest(fmt.Sprintf("invalid node request %q", rq.info.name))
	}
	rq.info.name = name
	var contentType string
	var tell func(w io.Writer) error
	switch rq.info.proxyPath {
	case "/metrics":
		contentType, tell = metricsText, func(w io.Writer) error { return s.cfg.Nodes.Metrics(rq.Context(), name, w) }
	case "/healthz":
		// The node answers, or it is not healthy.
		contentType, tell = "text/plain; charset=utf-8", func(w io.Writer) error {
			if err := s.cfg.Nodes.Metrics(rq.Context(), name, io.Discard); err != nil {
				return err
			}
			_, err := io.WriteString(w, "ok")
			return err
		}
	default:
		return &apierrors.StatusError{ErrStatus: metav1.Status{
			Status: metav1.StatusFailure, Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound,
			Message: fmt.Sprintf("nodes have no %s: their proxy serves /metrics and /healthz", rq.info.proxyPath), Details: &metav1.StatusDetails{},
		}}
	}
	if _, err := s.read(rq, ""); err != nil {
		return err // no such node
	}
	w := &logWriter{w: rq.w, rc: http.NewResponseController(rq.w), deadline: s.cfg.WriteDeadline, header: func() {
		rq.writeWarnings()
		rq.w.Header().Set("Content-Type", contentType)
		rq.w.WriteHeader(http.StatusOK)
	}}
	err := tell(w)
	if err == nil && rq.w.code == 0 {
		w.header()
	}
	return err
}
